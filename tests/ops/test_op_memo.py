"""Problems are kept for the next call, and nothing else changes."""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosformer import attention
from cosformer.ops.hopper import passes as hopper
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.hopper import source as hopper_source
from cosformer.ops.problem import memo


@pytest.fixture(autouse=True)
def empty():
    memo.problems.kept.clear()
    yield
    memo.problems.kept.clear()


def qkv(length=20, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, 2, length, 4, dtype=dtype, generator=generator)


def test_a_second_call_finds_the_problem_of_the_first():
    first = attention(*qkv(), causal=True)
    (kept,) = memo.problems.kept.values()
    assert torch.equal(attention(*qkv(), causal=True), first)
    assert list(memo.problems.kept.values()) == [kept]
    attention(*qkv(), causal=True, horizon=100)
    attention(*qkv(dtype=torch.float32), causal=True)
    assert len(memo.problems.kept) == 3


def test_only_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(memo, "ENTRIES", 4)
    for length in range(1, 10):
        attention(*qkv(length))
    assert len(memo.problems.kept) == 4


def test_long_ones_are_not_kept(monkeypatch):
    monkeypatch.setattr(memo, "LONGEST", 10)
    attention(*qkv())
    assert not memo.problems.kept


@pytest.mark.parametrize("given", [{"horizon": True}, {"causal": 1}, {"eps": True}])
def test_what_equals_a_kept_number_is_still_refused(given):
    attention(*qkv(1), horizon=1, causal=True, eps=1)
    with pytest.raises(TypeError, match=next(iter(given))):
        attention(*qkv(1), **{"horizon": 1, "causal": True, "eps": 1, **given})


def test_a_mask_is_not_kept():
    hidden = torch.zeros(1, 20, dtype=torch.bool)
    assert (attention(*qkv(), key_mask=hidden) == 0).all()
    assert (attention(*qkv()) != 0).any()


def test_what_inference_mode_made_serves_training():
    with torch.inference_mode():
        attention(*qkv(), causal=True)
    q, k, v = (x.requires_grad_() for x in qkv())
    attention(q, k, v, causal=True).sum().backward()
    assert q.grad is not None


def test_compiled_calls_keep_nothing():
    torch.compile(lambda q, k, v: attention(q, k, v), backend="eager")(*qkv())
    assert not memo.problems.kept


def test_threads_share_it(monkeypatch):
    monkeypatch.setattr(memo, "ENTRIES", 3)
    monkeypatch.setattr(memo, "basis", lambda *a, own=memo.basis: (time.sleep(0), own(*a))[1])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            outs = list(pool.map(lambda n: attention(*qkv(1 + n % 9)), range(300)))
    finally:
        sys.setswitchinterval(before)
    for n, out in enumerate(outs):
        assert torch.equal(out, attention(*qkv(1 + n % 9)))


def test_rows_are_copied_where_they_do_not_begin_at_16_bytes():
    flat = torch.randn(2 * 3 * 8 * 16 + 1).bfloat16()
    moved = flat[1:].view(2, 3, 8, 16)
    assert moved.is_contiguous()
    assert moved.data_ptr() % 16
    assert hopper.aligned(moved).data_ptr() % 16 == 0
    assert hopper.aligned(flat[:-1].view(2, 3, 8, 16)).data_ptr() == flat.data_ptr()


def test_steps_between_states_follow_from_their_shape():
    state = torch.zeros(1, 2, 2, 8, 9).transpose(0, 1)  # [2, 1, …]: the head's stride is anything
    assert state.is_contiguous()
    assert hopper_plan._steps(state) == (2 * 8 * 9, 0)
    assert hopper_plan._steps(torch.zeros(2, 3, 4, 2, 8, 9)) == (4 * 144, 144)


def test_segments_fill_the_processors():
    assert hopper_plan.choose_segments(128, 4096, 132, extra=0.6) == 1
    assert hopper_plan.choose_segments(32, 16384, 132, extra=0.6) == 4
    assert hopper_plan.choose_segments(16, 65536, 132, extra=0.6) == 8
    assert hopper_plan.choose_segments(1, 100, 132) == 1
    for programs in (1, 7, 100, 131, 133, 500):
        for length in (1, 257, 4096, 10**6):
            segments = hopper_plan.choose_segments(programs, length, 132)
            assert 1 <= segments <= max(1, length // 256)


def test_kernel_parameters_have_the_size_of_their_struct():
    pointers, wide, narrow = 14, 5 * 3 + 2 + 1 + 4, 10
    assert pointers == hopper_plan.POINTERS
    assert hopper_plan.TAIL.size == 8 * wide + 4 * (narrow + 2)


def test_the_kernel_asks_for_every_option():
    code = re.sub(r"//.*", "", hopper_source.source())
    for name in hopper_plan.Sweep._fields:
        assert re.search(rf"\b{name}\b", code), name
    assert "#include" not in hopper_source.source()
