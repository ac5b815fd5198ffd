"""Shares in the sums of columns so far, by their kernels on a GPU."""

import pytest
import torch
from running_share_cases import SCALES, SIZES, check_shares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [*SIZES, 1023])
def test_kernels_are_as_exact_as_torch(size, scale):
    check_shares(size, scale, device="cuda")
