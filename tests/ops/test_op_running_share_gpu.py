"""Shares in the sums of columns so far, by their kernels on a GPU."""

import pytest
import torch
from running_share_cases import SCALES, check_shares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [1, 31, 33, 64, 130, 1023])  # tiles of 64 rows and 32 columns
def test_kernels_are_as_exact_as_torch(size, scale):
    check_shares(size, scale, device="cuda")


def test_cells_may_be_more_than_32_bits_count():
    from cell_cases import check_cells  # which needs Triton

    check_cells("cuda")
