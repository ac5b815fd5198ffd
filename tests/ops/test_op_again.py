"""A call like an earlier one is not checked again, and computes what an ordinary one does."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import stub_driver
import torch
from stub_driver import (
    FAMILY,
    attention,
    both_passes,
    check_again,
    cosine,
    leaves,
    linear_attention,
    qkv,
)
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import cosformer
from cosformer.ops import again, chunked
from cosformer.ops.autograd import given_for, kernels
from cosformer.ops.autograd.repeated import Repeated

COSINE = {
    "causal": {"causal": True},
    "both ways": {},
    "fewer keys": {"keys": 70},
    "wide": {"width": 128},
    "decaying": {"causal": True, "decay": 0.9},
    "decaying, both ways": {"decay": 0.9},
}


@pytest.mark.parametrize("name", [*COSINE, *FAMILY])
@pytest.mark.parametrize("length", [100, 6000])
@pytest.mark.parametrize("graded", [True, False])
def test_it_launches_what_an_ordinary_call_launches(
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

    check_again(both, ordinary, monkeypatch)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("call", [attention, linear_attention])
def test_gates_of_other_values_are_summed_anew_and_get_gradients(
    driver, ordinary, monkeypatch, call, causal
):
    options = {"normaliser": "none"} if call is linear_attention else {}

    def both(seed):
        inputs = leaves(seed=seed)
        gates = -torch.rand(1, 2, 100, generator=torch.Generator().manual_seed(seed))
        gates.requires_grad_()
        driver.launches.clear()
        out = call(*inputs, causal=causal, log_decay=gates, **options)
        found = torch.autograd.grad(out, [*inputs, gates], qkv(seed=9)[0])
        return [stub_driver.head(x) for x in (out, *found[:3])], driver.launches[:]

    check_again(both, ordinary, monkeypatch)
    assert list(again._calls.values()) != [None]


def others():
    """Calls that differ from `attention(*qkv(), causal=True)` in one thing each."""
    q, k, v = qkv()
    yield "a whole number", lambda: attention(q, k, v, causal=True, eps=1)
    yield "a horizon", lambda: attention(q, k, v, causal=True, horizon=200.0)
    yield "other strides", lambda: attention(q.mT.contiguous().mT, k, v, causal=True)
    yield "another length", lambda: attention(*qkv(99), causal=True)
    moved = torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape)
    yield "not at 16 bytes", lambda: attention(moved, k, v, causal=True)
    mask = torch.ones(1, 100, dtype=torch.bool)
    yield "a mask", lambda: attention(q, k, v, causal=True, key_mask=mask)
    yield "learned", lambda: attention(q, k, v, causal=True, decay=torch.tensor([0.9, 0.8]))
    gates = -torch.rand(1, 2, 100)
    yield "gates", lambda: attention(q, k, v, causal=True, log_decay=gates)
    yield (
        "gates of a class",
        lambda: attention(q, k, v, causal=True, log_decay=gates.as_subclass(wider)),
    )
    wider = type("Wider", (torch.Tensor,), {})
    yield "a subclass", lambda: attention(q.as_subclass(wider), k, v, causal=True)


@pytest.mark.parametrize("name", [name for name, _ in others()])
def test_what_differs_is_checked(driver, ordinary, name):
    attention(*qkv(), causal=True)
    attention(*qkv(), causal=True, eps=1.0)
    ordinary.clear()
    dict(others())[name]()
    assert len(ordinary) == 1


def test_under_a_mode_and_in_a_capture_every_call_is_checked(driver, ordinary):
    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    attention(*qkv(), causal=True)
    ordinary.clear()
    with Passes():
        attention(*qkv(), causal=True, impl="chunked")
    driver.captures = 1
    attention(*qkv(), causal=True)
    assert len(ordinary) == 2


def test_tensors_are_not_kept(driver):
    q, k, v = qkv()
    kept = [weakref.ref(x) for x in (q, k, v)]
    attention(q, k, v, causal=True)
    del q, k, v
    gc.collect()
    assert not any(x() is not None for x in kept)


def test_only_so_many_are_remembered(driver, monkeypatch):
    monkeypatch.setattr(again, "CALLS", 3)
    for length in range(10, 16):
        attention(*qkv(length), causal=True)
    assert len(again._calls) == 3


def test_tables_that_would_fill_the_memory_are_not_kept(driver, monkeypatch):
    monkeypatch.setattr(again, "MOST_KEPT", 8 * 2 * 100 - 1)  # L of two heads
    linear_attention(*qkv(), **FAMILY["retention"])
    assert list(again._calls.values()) == [None]


class NoTapes(dict):
    """Every pass was tried, and none could be repeated."""

    def __contains__(self, key):
        return True


@pytest.mark.parametrize("gated", [False, True])
def test_second_derivatives_are_those_of_an_ordinary_call(monkeypatch, gated):
    monkeypatch.setattr(kernels, "forward", chunked.forward)
    monkeypatch.setattr(kernels, "backward", chunked.backward)
    q, k, v = (x.double().requires_grad_() for x in qkv(20))
    gates = (-torch.rand(1, 2, 20, dtype=torch.float64)).requires_grad_() if gated else None
    leaves = [q, k, v, *([gates] if gated else [])]
    options = cosine.Arguments(
        **stub_driver.COSINE | {"causal": True, "log_decay": gates, "impl": "chunked"}
    )
    problem = cosine._problem(q, k, options)
    given = given_for(q, k, v, problem, None, impl="chunked", keep_state=False)
    repeated = Repeated(None, given.constants, given.options)
    repeated._tapes = NoTapes()

    def derivatives(out):
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    ordinary = cosformer.attention(q, k, v, causal=True, log_decay=gates, impl="chunked")
    assert_close(derivatives(repeated(q, k, v, gates)), derivatives(ordinary))


def test_a_pass_with_work_of_torch_in_it_is_not_taken_for_a_tape(driver):
    q, k, v = leaves()
    grouped = [x[:, :1].detach().requires_grad_() for x in (k, v)]
    for _ in range(3):
        out = attention(q, *grouped, causal=True)
        torch.autograd.grad(out, [q, *grouped], qkv(seed=9)[0])
    (call,) = again._calls.values()
    assert [name for name, tape in call._tapes.items() if tape is not None] == ["forward"]


def test_threads_share_what_is_remembered(driver):
    expected = [both_passes(leaves(seed=n), qkv(seed=9)[0], causal=True) for n in range(20)]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda n: both_passes(leaves(seed=n), qkv(seed=9)[0], causal=True), range(20))
        )
    assert found == expected
