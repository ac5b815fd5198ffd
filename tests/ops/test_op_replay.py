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

from cosformer.ops import hopper
from cosformer.ops.hopper import nvrtc
from cosformer.ops.replay import replay


@pytest.mark.parametrize(
    ("causal", "width", "lengths", "graded"),
    [
        (True, 64, (100, 100), False),
        (True, 64, (6000, 6000), True),
        (False, 128, (100, 100), True),
        (False, 64, (6000, 700), True),
    ],
)
def test_a_replay_launches_what_python_launches(
    driver, ordinary, monkeypatch, causal, width, lengths, graded
):
    def call(seed):
        inputs = (leaves if graded else qkv)(lengths[0], width, lengths[1], seed)
        grad = qkv(lengths[0], width, seed=seed + 9)[0] if graded else None
        driver.launches.clear()
        return both_passes(inputs, grad, causal=causal), driver.launches[:]

    check_replays(call, ordinary, monkeypatch)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("length", [100, 6000])
def test_the_family_is_replayed(driver, ordinary, monkeypatch, name, length):
    def call(seed):
        inputs, grad = leaves(length, seed=seed), qkv(length, seed=seed + 9)[0]
        driver.launches.clear()
        found = both_passes(inputs, grad, linear_attention, **FAMILY[name])
        return found, driver.launches[:]

    check_replays(call, ordinary, monkeypatch)


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


def test_a_thread_without_a_context_gets_one(driver, monkeypatch):
    entered = []
    monkeypatch.setattr(nvrtc, "_enter", entered.append)
    first = both_passes(qkv(), None)
    driver.codes = [nvrtc.NO_CONTEXT]
    assert both_passes(qkv(), None) == first
    assert len(entered) == 1


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
