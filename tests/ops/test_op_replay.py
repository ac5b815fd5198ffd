"""Replayed calls launch what recorded ones launched, on their own tensors; all else is ordinary."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stub_driver import (
    FAMILY,
    GRADS,
    attention,
    both_passes,
    by_python,
    check_replays,
    head,
    leaves,
    linear_attention,
    qkv,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.ops import hopper
from cosformer.ops.hopper import nvrtc, watching
from cosformer.ops.hopper.watch import watcher
from cosformer.ops.problem import Constants, Given
from cosformer.ops.replay import replay
from cosformer.ops.replay.tape import Tape

COSINE = {
    "causal": {"causal": True},
    "both ways": {},
    "fewer keys": {"keys": 70},
    "wide": {"width": 128},
}


@pytest.mark.parametrize("name", [*COSINE, *FAMILY])
@pytest.mark.parametrize("length", [100, 6000])
@pytest.mark.parametrize("graded", [True, False])
def test_a_replay_launches_what_python_launches(
    driver, ordinary, monkeypatch, name, length, graded
):
    options = dict(COSINE.get(name) or FAMILY.get(name) or {})
    sizes = {each: options.pop(each) for each in ("keys", "width") if each in options}
    call = linear_attention if name in FAMILY else attention

    def both(seed):
        inputs = (leaves if graded else qkv)(length, seed=seed, **sizes)
        grad = qkv(length, seed=seed + 9, **sizes)[0] if graded else None
        driver.launches.clear()
        return both_passes(inputs, grad, call, **options), driver.launches[:]

    check_replays(both, ordinary, monkeypatch)


def test_tables_that_would_fill_the_memory_are_not_kept(driver, monkeypatch):
    monkeypatch.setattr(replay, "MOST_KEPT", 8 * 2 * 100 - 1)
    for _ in range(2):
        linear_attention(*qkv(), **FAMILY["retention"])
    assert list(replay._programs.values()) == [False]


@pytest.mark.parametrize("name", GRADS)
def test_gradients_of_any_layout(driver, monkeypatch, name):
    inputs, grad = leaves(), qkv(seed=5)[0]
    for _ in range(2):
        both_passes(inputs, grad)
    passes, own = [], hopper.backward
    monkeypatch.setattr(hopper, "backward", lambda *a: (passes.append(1), own(*a))[1])
    found = [both_passes(inputs, GRADS[name](grad)) for _ in range(3)]
    assert len(passes) == 1  # recorded
    expected = by_python(monkeypatch, lambda: both_passes(inputs, GRADS[name](grad)))
    assert found == [expected] * 3


def test_tensors_that_begin_at_the_same_place(driver, monkeypatch):
    q, k, v = leaves()

    def calls():
        out = attention(q, k, v)
        same = both_passes([q, q, v], v)
        return same, [head(x) for x in torch.autograd.grad(out, (q, k, v), out)], head(out)

    first = calls()
    both_passes([q, k, v], qkv(seed=1)[0])
    assert calls() == calls() == first == by_python(monkeypatch, calls)


def test_second_derivatives_are_those_of_the_ordinary_path(driver, ordinary, monkeypatch):
    inputs = leaves(20)
    q, k, _ = inputs
    exact = attention(*(x.double() for x in qkv(20)), causal=True, impl="chunked")
    positions = torch.arange(20.0, dtype=torch.float64)
    weights = torch.cos(torch.pi / 40 * (positions[:, None] - positions)).tril()
    total = ((q.relu() @ k.relu().mT).double() * weights).sum(-1)
    driver.answers = {
        ("sweep", 4): bytes(exact.bfloat16().view(torch.uint8).flatten().tolist()),
        ("sweep", 5): bytes(total.float().view(torch.uint8).flatten().tolist()),
    }

    def call(impl="hopper"):
        out = attention(*inputs, causal=True, impl=impl)
        first = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs)

    both_passes(inputs, exact.bfloat16(), causal=True)
    ordinary.clear()
    for _ in range(2):
        found = call()
        for x, y in zip(found, by_python(monkeypatch, call), strict=True):
            assert torch.equal(x, y)
    assert len(ordinary) == 2  # those by Python
    for x, y in zip(found, call("chunked"), strict=True):
        assert (x - y).float().norm() < 0.05 * y.float().norm()


def test_what_backward_needs_is_checked(driver):
    q, k, v = qkv()
    attention(q, k, v)
    out = attention(q.requires_grad_(), k, v)
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(v)
    out = attention(q, k, v)
    out.backward(v)
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward(v)


@pytest.mark.parametrize("launches", [0, 1])
def test_a_launch_that_fails_is_an_error_in_both_passes(driver, monkeypatch, launches):
    inputs, grad = leaves(), qkv()[0]
    for _ in range(2):
        both_passes(inputs, grad, causal=True)
    monkeypatch.setattr(nvrtc, "libraries", lambda: [type("Cuda", (), {
        "cuGetErrorString": lambda self, code, text: 0})()])  # fmt: skip
    driver.codes = [*[0] * launches, 719]
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with error 719"):
        both_passes(inputs, grad, causal=True)


def test_only_so_many_programs_are_kept(driver, monkeypatch):
    monkeypatch.setattr(replay, "PROGRAMS", 3)
    for length in range(1, 9):
        attention(*qkv(length))
    assert len(replay._programs) == 3


def test_threads_share_programs(driver, monkeypatch):
    def call(n):
        inputs = leaves(2 + n % 7, seed=n)  # with one token a digest would read past ψ
        return both_passes(inputs, inputs[2].detach(), causal=n % 2 == 0)

    monkeypatch.setattr(replay, "PROGRAMS", 5)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(60)))
    assert found == by_python(monkeypatch, lambda: [call(n) for n in range(60)])


class _Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Tensor(torch.Tensor):
    pass


def same(x):
    return x


OTHERS = {
    "causal": {"causal": True},
    "horizon": {"horizon": 101},
    "another kind of number": {"horizon": 100.0},
    "eps": {"eps": 1e-3},
    "query_start": {"query_start": 0},
    "impl": {"impl": "auto"},
    "a horizon in a tensor": {"horizon": torch.tensor([100.0, 100.0])},
    "mask": {"key_mask": torch.ones(1, 100, dtype=torch.bool)},
}
TENSORS = {
    "batch": lambda x: torch.cat([x, x]),
    "length": lambda x: x[:, :, :99],
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "alignment": GRADS["not at 16 bytes"],
    "subclass": lambda x: x.as_subclass(_Tensor),
}
PLACES = {
    "function mode": _Function,
    "dispatch mode": _Dispatch,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(same, same),
}


@pytest.mark.parametrize("name", [*OTHERS, *TENSORS, *PLACES])
def test_what_differs_is_not_replayed(driver, ordinary, name):
    for _ in range(2):
        attention(*qkv(), horizon=100)
    assert len(ordinary) == 1
    change = TENSORS.get(name, same)
    with PLACES.get(name, torch.enable_grad)():
        attention(*map(change, qkv()), **{"horizon": 100, **OTHERS.get(name, {})})
    assert len(ordinary) == 2


def test_a_call_that_is_captured_is_ordinary(driver, ordinary):
    attention(*qkv())
    driver.captures = 1
    attention(*qkv())
    assert len(ordinary) == 2


@pytest.mark.parametrize("given", [{"eps": True}, {"horizon": True}, {"causal": 1}])
def test_what_equals_a_kept_option_is_still_refused(driver, given):
    for _ in range(2):
        attention(*qkv(1), horizon=1, causal=True, eps=1)
    with pytest.raises(TypeError, match=next(iter(given))):
        attention(*qkv(1), **{"horizon": 1, "causal": True, "eps": 1, **given})


@pytest.mark.parametrize("spoilt", ["twice", "a state", "ψ in pieces", "no launch", "a copy", ""])
def test_a_tape_of_more_than_one_pass_over_its_inputs_is_not_replayed(spoilt):
    q, k, v = qkv(8)
    psi = torch.ones(1, 1, 2, 8).mT if spoilt == "ψ in pieces" else torch.ones(1, 1, 8, 2)
    given = Given(q, k, v, None, None, Constants(None, psi, psi, None, None), None)
    tape = Tape((q, k, v))

    def forward():
        out = torch.empty_like(q)
        if spoilt != "no launch":
            watcher().launched(None, (q, k, v, out, None, psi))
        return (out.clone() if spoilt == "a copy" else out), None

    with watching(tape):
        for _ in range(1 + (spoilt == "twice")):
            state = [torch.ones(3)] if spoilt == "a state" else []
            watcher().run(forward, given, [q, k, v, *state], [psi])
    assert watcher() is None
    assert tape.results() == (None if spoilt else [3])
