"""What the host prepares for `sweep.cu`: segments, strides, parameters, the text itself."""

import re

import torch

from cosformer.ops.hopper import aligned
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.hopper.source import source


def test_rows_are_copied_where_they_do_not_begin_at_16_bytes():
    flat = torch.randn(2 * 3 * 8 * 16 + 1).bfloat16()
    moved = flat[1:].view(2, 3, 8, 16)
    assert moved.is_contiguous()
    assert moved.data_ptr() % 16
    assert aligned(moved).data_ptr() % 16 == 0
    assert aligned(flat[:-1].view(2, 3, 8, 16)).data_ptr() == flat.data_ptr()


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
    pointers, wide, narrow = 12, 5 * 3 + 2 + 1 + 4, 8
    assert pointers == hopper_plan.POINTERS
    assert hopper_plan.TAIL.size == 8 * wide + 4 * (narrow + 2)


def test_the_kernel_asks_for_every_option():
    code = re.sub(r"//.*", "", source())
    for name in hopper_plan.Sweep._fields:
        assert re.search(rf"\b{name}\b", code), name
    assert "#include" not in source()
