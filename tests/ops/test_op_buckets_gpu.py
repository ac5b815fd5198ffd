"""Buckets of rows by direction, by their kernel on a GPU."""

import pytest
import torch
from buckets_cases import HALVES, check_buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("halves", HALVES, ids=str)
@pytest.mark.parametrize(("length", "width"), [(1, 6), (129, 64), (1000, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_finds_the_largest(length, width, halves, dtype):
    check_buckets(length, width, halves, dtype, device="cuda")
