"""A call like an earlier one is not checked again, and computes what an ordinary one does."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import stub_driver
import torch
from stub_driver import FAMILY, attention, both_passes, check_again, leaves, linear_attention, qkv
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer.ops import again

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


def test_second_derivatives_are_those_of_an_ordinary_call(driver, monkeypatch):
    inputs = leaves(20)
    exact = attention(*(x.double() for x in qkv(20)), causal=True, impl="chunked")
    driver.answers = {
        ("sweep", 4): bytes(exact.bfloat16().view(torch.uint8).flatten().tolist()),
        ("sweep", 5): bytes(torch.ones(2 * 20).view(torch.uint8).tolist()),
    }

    def call():
        out = attention(*inputs, causal=True)
        first = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs)

    expected = stub_driver.each_time(monkeypatch, call)
    call()
    assert all(map(torch.equal, call(), expected))


def test_threads_share_what_is_remembered(driver):
    expected = [both_passes(leaves(seed=n), qkv(seed=9)[0], causal=True) for n in range(20)]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda n: both_passes(leaves(seed=n), qkv(seed=9)[0], causal=True), range(20))
        )
    assert found == expected
