"""Rivals of softmax on a GPU: what is long stays in 16 bits."""

import pytest
import torch
from rivals_cases import CASES, DTYPES, LONG, SHARP, check_long, check_rival

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("masked", "length"), [(False, 512), (True, 1001), (False, 4096)])
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_16_bits_are_a_few_roundings_from_float64(name, causal, masked, length, dtype):
    check_rival(name, causal, length, dtype, masked=masked, key_heads=2, device="cuda")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("sharp", SHARP)
def test_sinkhorn_takes_almost_all_from_a_block_that_is_not_full(sharp, dtype):
    check_rival("sinkhorn", False, 266, dtype, sharp=sharp, device="cuda")


@pytest.mark.parametrize(("name", "causal"), LONG)
def test_no_tensor_as_long_as_the_inputs_is_wider_than_they_are(name, causal):
    check_long(name, causal, device="cuda")
