"""Replayed calls on a Hopper GPU: bit for bit what Python computes, wherever they run."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_marks import ON_HOPPER
from stub_driver import FAMILY, by_python, cosine, linear

from cosformer import attention, linear_attention
from cosformer.ops import hopper
from cosformer.ops.replay import native, replay

pytestmark = ON_HOPPER


@pytest.fixture(autouse=True)
def replaying(monkeypatch, host):
    connected = native.connected(host)
    monkeypatch.setattr(replay, "loaded_for", lambda q: connected)
    monkeypatch.setattr(replay, "_programs", {})


@pytest.fixture
def python(monkeypatch):
    """Counts what goes through Python: calls, and passes by the kernels."""
    counts = {"calls": 0, "forward": 0, "backward": 0}

    def count(where, name, key):
        own = getattr(where, name)

        def counted(*args):
            counts[key] += 1
            return own(*args)

        monkeypatch.setattr(where, name, counted)

    count(cosine, "_attention", "calls")
    count(linear, "_linear_attention", "calls")
    count(hopper, "forward", "forward")
    count(hopper, "backward", "backward")
    return counts


def leaves(length=500, width=64, heads=2, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(
        3, 2, heads, length, width, device="cuda", dtype=torch.bfloat16, generator=generator
    )
    return [x.clone().requires_grad_() for x in made]


def both(inputs, grad=None, call=attention, **options):
    out = call(*inputs, **options)
    given = torch.ones_like(out) if grad is None else grad
    return [out.detach(), *torch.autograd.grad(out, inputs, given)]


def check(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


ALL = {
    "causal": {"causal": True},
    "both ways": {},
    **{name: {"call": linear_attention, **options} for name, options in FAMILY.items()},
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("length", [100, 20000])
@pytest.mark.usefixtures("poisoned")
def test_results_are_the_same_bits(python, monkeypatch, name, length):
    inputs = [leaves(length, seed=seed) for seed in range(4)]
    expected = by_python(monkeypatch, lambda: [both(x, **ALL[name]) for x in inputs])
    python.update(calls=0, forward=0, backward=0)
    for each, wanted in zip(inputs, expected, strict=True):
        check(both(each, **ALL[name]), wanted)
    # The first call is recorded, and so is the backward of the second.
    assert python == {"calls": 1, "forward": 1, "backward": 2}


def test_a_stream_waits_for_nothing_but_itself(monkeypatch):
    inputs = leaves(4000)
    expected = by_python(monkeypatch, lambda: both(inputs, causal=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # whoever launches elsewhere reads too early
            made = [(x + 0).detach().requires_grad_() for x in inputs]
            found = both(made, causal=True)
        torch.cuda.current_stream().wait_stream(stream)
        check(found, expected)
        check(both(inputs, causal=True), expected)


def test_threads_with_streams_of_their_own(monkeypatch):
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def call(n):
        with torch.cuda.stream(streams[n % 2]):
            found = both(leaves(100 + 50 * (n % 3), seed=n), causal=True)
            torch.cuda.current_stream().synchronize()
        return found

    expected = by_python(monkeypatch, lambda: [call(n) for n in range(30)])
    with ThreadPoolExecutor(2) as pool:
        for each, wanted in zip(pool.map(call, range(30)), expected, strict=True):
            check(each, wanted)
