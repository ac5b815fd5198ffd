"""Problems are kept for the next call, and nothing else changes."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosformer import attention, memo
from cosformer.ops.problem import PROBLEMS, as_numbers, build, log_rates


@pytest.fixture(autouse=True)
def empty():
    PROBLEMS.kept.clear()
    yield
    PROBLEMS.kept.clear()


def qkv(length=20, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, 2, length, 4, dtype=dtype, generator=generator)


def test_a_second_call_finds_the_problem_of_the_first():
    first = attention(*qkv(), causal=True)
    (kept,) = PROBLEMS.kept.values()
    assert torch.equal(attention(*qkv(), causal=True), first)
    assert list(PROBLEMS.kept.values()) == [kept]
    attention(*qkv(), causal=True, horizon=100)
    attention(*qkv(dtype=torch.float32), causal=True)
    assert len(PROBLEMS.kept) == 3


def test_only_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(memo, "ENTRIES", 4)
    for length in range(1, 10):
        attention(*qkv(length))
    assert len(PROBLEMS.kept) == 4


def test_long_ones_are_not_kept(monkeypatch):
    monkeypatch.setattr(sys.modules[build.__module__], "LONGEST", 10)
    attention(*qkv())
    assert not PROBLEMS.kept


@pytest.mark.parametrize("given", [{"horizon": True}, {"causal": 1}, {"eps": True}])
def test_what_equals_a_kept_number_is_still_refused(given):
    attention(*qkv(1), horizon=1, causal=True, eps=1)
    with pytest.raises(TypeError, match=next(iter(given))):
        attention(*qkv(1), **{"horizon": 1, "causal": True, "eps": 1, **given})


def test_a_mask_is_not_kept():
    hidden = torch.zeros(1, 20, dtype=torch.bool)
    assert (attention(*qkv(), key_mask=hidden) == 0).all()
    assert (attention(*qkv()) != 0).any()


def test_compiled_calls_keep_nothing():
    torch.compile(lambda q, k, v: attention(q, k, v), backend="eager")(*qkv())
    assert not PROBLEMS.kept


def test_threads_share_it(monkeypatch):
    monkeypatch.setattr(memo, "ENTRIES", 3)
    module = sys.modules[build.__module__]
    own = module.with_basis
    monkeypatch.setattr(module, "with_basis", lambda *given: (time.sleep(0), own(*given))[1])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            outs = list(pool.map(lambda n: attention(*qkv(1 + n % 9)), range(300)))
    finally:
        sys.setswitchinterval(before)
    for n, out in enumerate(outs):
        assert torch.equal(out, attention(*qkv(1 + n % 9)))


def test_logarithms_of_decays_by_numbers_are_made_once():
    """Packed sequences have no problem that is kept, and a CUDA graph could not copy numbers."""
    q, k, _ = qkv()
    rates = as_numbers([0.5, 0.9])
    first = log_rates(rates, q, k)
    assert log_rates(as_numbers([0.5, 0.9]), q, k) is first
    torch.testing.assert_close(first.exp(), torch.tensor([[[0.5], [0.9]]], dtype=torch.float64))
    assert log_rates(as_numbers([0.5, 0.8]), q, k) is not first
    assert log_rates(as_numbers([1.0, 1.0]), q, k) is None
