"""Replayed calls launch what recorded ones launched, on their own tensors; all else is ordinary."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import stub_driver
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cosformer import attention
from cosformer.ops import cosine, hopper, memo, native, nvrtc, replay, tape

KERNELS = {"impl": "triton"}


@pytest.fixture
def driver(monkeypatch, host):
    driver = stub_driver.install(monkeypatch)
    addresses = (native._address(driver.launch), native._address(driver.is_capturing))
    host.connect(*addresses, "cpu", nvrtc.mend_launch)
    monkeypatch.setattr(replay, "_programs", {})
    monkeypatch.setattr(memo, "_kept", {})
    monkeypatch.setattr(replay, "loaded", lambda: host)
    return driver


@pytest.fixture
def ordinary(monkeypatch):
    """Counts the calls that were not replayed."""
    calls = []
    own = cosine._attention
    monkeypatch.setattr(cosine, "_attention", lambda *a: (calls.append(1), own(*a))[1])
    return calls


def qkv(length=100, width=64, keys=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = (length, keys or length, keys or length)
    return [torch.randn(1, 2, n, width, generator=generator).bfloat16() for n in lengths]


def leaves(*given, **options):
    return [x.requires_grad_() for x in qkv(*given, **options)]


def head(x):
    """The digest that a kernel left."""
    return x.detach().contiguous().view(-1)[:8].view(torch.int16).tolist()


def both_passes(inputs, grad, **options):
    out = attention(*inputs, **KERNELS, **options)
    found = torch.autograd.grad(out, inputs, grad) if grad is not None else ()
    return [head(x) for x in (out, *found)]


def by_python(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(replay, "loaded", lambda: None)
        return call()


@pytest.mark.parametrize(
    ("causal", "lengths"),
    [(True, (100, 100)), (True, (6000, 6000)), (False, (100, 100)), (False, (6000, 700))],
)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("graded", [True, False])
def test_a_replay_launches_what_python_launches(
    driver, ordinary, monkeypatch, causal, width, lengths, graded
):
    def call(seed):
        inputs = (leaves if graded else qkv)(lengths[0], width, lengths[1], seed)
        grad = qkv(lengths[0], width, seed=seed + 9)[0] if graded else None
        driver.launches.clear()
        return both_passes(inputs, grad, causal=causal), driver.launches[:]

    for seed in (1, 2):  # the first forward is recorded, and the backward of the second
        call(seed)
    ordinary.clear()
    replays = [call(seed) for seed in (3, 4)]
    assert not ordinary
    assert replays == [by_python(monkeypatch, lambda s=seed: call(s)) for seed in (3, 4)]
    assert replays[0] != replays[1]


def test_only_inputs_that_ask_for_a_gradient_get_one(driver, ordinary):
    q, k, v = qkv()
    for _ in range(3):
        x = v.clone().requires_grad_()
        attention(q, k, x, **KERNELS).backward(q)
        assert x.grad is not None
        assert q.grad is None
    assert len(ordinary) == 1


GRADS = {
    "expanded": lambda x: x[..., :1, :1].expand(x.shape),
    "transposed": lambda x: x.mT.contiguous().mT,
    "not at 16 bytes": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "of other rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


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
        out = attention(q, k, v, **KERNELS)
        same = both_passes([q, q, v], v)
        return same, [head(x) for x in torch.autograd.grad(out, (q, k, v), out)], head(out)

    first = calls()
    both_passes([q, k, v], qkv(seed=1)[0])
    assert calls() == calls() == first == by_python(monkeypatch, calls)


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
        attention(*qkv(), horizon=100, **KERNELS)
    assert len(ordinary) == 1
    change = TENSORS.get(name, same)
    with PLACES.get(name, torch.enable_grad)():
        attention(*map(change, qkv()), **{"horizon": 100, **KERNELS, **OTHERS.get(name, {})})
    assert len(ordinary) == 2


@pytest.mark.parametrize("place", ["function mode", "dispatch mode", "hooks"])
def test_modes_and_hooks_see_every_call(driver, ordinary, place):
    with PLACES[place]():
        for _ in range(3):
            attention(*leaves(), **KERNELS)
    assert len(ordinary) == 3


def test_autocast_that_casts_nothing_is_replayed(driver, ordinary):
    with PLACES["autocast"]():
        for _ in range(2):
            attention(*qkv(), **KERNELS)
        assert len(ordinary) == 1
        for _ in range(2):  # a copy is cast, and copies are not on the tape
            attention(*(x.float() for x in qkv()), **KERNELS)
    assert len(ordinary) == 3


def test_a_call_that_is_captured_is_ordinary(driver, ordinary):
    attention(*qkv(), **KERNELS)
    driver.captures = 1
    attention(*qkv(), **KERNELS)
    assert len(ordinary) == 2


@pytest.mark.parametrize("given", [{"eps": True}, {"horizon": True}, {"causal": 1}])
def test_what_equals_a_kept_option_is_still_refused(driver, given):
    for _ in range(2):
        attention(*qkv(1), horizon=1, causal=True, eps=1, **KERNELS)
    with pytest.raises(TypeError, match=next(iter(given))):
        attention(*qkv(1), **{"horizon": 1, "causal": True, "eps": 1, **KERNELS, **given})


def test_what_torch_computes_is_not_replayed(driver, ordinary):
    for _ in range(3):
        attention(*qkv(8), impl="chunked")
    assert len(ordinary) == 3


@pytest.mark.parametrize("spoilt", ["twice", "a state", "ψ in pieces", "no launch", "a copy", ""])
def test_a_tape_of_more_than_one_pass_over_its_inputs_is_not_replayed(spoilt):
    q, k, v = qkv(8)
    psi = torch.ones(1, 1, 2, 8).mT if spoilt == "ψ in pieces" else torch.ones(1, 1, 8, 2)
    given = (q, k, v, v if spoilt == "a state" else None, None, psi, psi)
    with tape.taping(q, k, torch.clone(v) if spoilt == "a state" else v) as tape_of:

        @tape.taped
        def forward(*tensors):
            out = torch.empty_like(q)
            if spoilt != "no launch":
                tape.current().launched(None, (*tensors[:3], out, None, psi))
            return (out.clone() if spoilt == "a copy" else out), None

        for _ in range(1 + (spoilt == "twice")):
            forward(*given)
    assert tape.current() is None
    assert tape_of.results() == (None if spoilt else [3])


def test_second_derivatives_are_those_of_the_ordinary_path(driver, ordinary, monkeypatch):
    q, k, v = inputs = leaves(20)
    exact = attention(*(x.double() for x in qkv(20)), causal=True, impl="chunked")
    positions = torch.arange(20.0, dtype=torch.float64)
    weights = torch.cos(torch.pi / 40 * (positions[:, None] - positions)).tril()
    total = ((q.relu() @ k.relu().mT).double() * weights).sum(-1)
    driver.answers = {
        ("sweep", 4): bytes(exact.bfloat16().view(torch.uint8).flatten().tolist()),
        ("sweep", 5): bytes(total.float().view(torch.uint8).flatten().tolist()),
    }

    def call(impl="triton"):
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


def test_compiled_autograd_calls_the_node(driver, monkeypatch):
    from torch._dynamo.compiled_autograd import _enable

    inputs, grad = leaves(), qkv(seed=5)[0]

    def call():
        with _enable(lambda graph: graph):
            return both_passes(inputs, grad)

    for _ in range(2):
        both_passes(inputs, grad)
    assert call() == both_passes(inputs, grad)


def test_checkpointing_recomputes_a_first_call(driver):
    for _ in range(2):
        inputs = leaves()
        out = checkpoint(lambda *x: attention(*x, **KERNELS), *inputs, use_reentrant=False)
        out.sum().backward()
        assert all(x.grad is not None for x in inputs)


def test_what_backward_needs_is_checked(driver):
    q, k, v = qkv()
    attention(q, k, v, **KERNELS)
    out = attention(q.requires_grad_(), k, v, **KERNELS)
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(v)
    out = attention(q, k, v, **KERNELS)
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


def test_a_thread_without_a_context_gets_one(driver, monkeypatch):
    entered = []
    monkeypatch.setattr(nvrtc, "_enter", entered.append)
    first = both_passes(qkv(), None)
    driver.codes = [nvrtc.NO_CONTEXT]
    assert both_passes(qkv(), None) == first
    assert len(entered) == 1


def test_memory_that_torch_fills_is_filled(driver, ordinary):
    torch.use_deterministic_algorithms(True)
    try:
        outs = [attention(*qkv(), **KERNELS) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(ordinary) == 1
    for out in outs:
        assert out.flatten()[8:].isnan().all()


def test_only_so_many_programs_are_kept(driver, monkeypatch):
    monkeypatch.setattr(replay, "PROGRAMS", 3)
    for length in range(1, 9):
        attention(*qkv(length), **KERNELS)
    assert len(replay._programs) == 3


def test_threads_share_programs(driver, monkeypatch):
    def call(n):
        inputs = leaves(1 + n % 7, seed=n)
        return both_passes(inputs, inputs[2].detach(), causal=n % 2 == 0)

    monkeypatch.setattr(replay, "PROGRAMS", 5)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(60)))
    assert found == by_python(monkeypatch, lambda: [call(n) for n in range(60)])
