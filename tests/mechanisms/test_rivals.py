"""Rivals with 16-bit products as on a GPU, emulated on a CPU."""

import pytest
import torch
from mechanism_cases import draw
from rivals_cases import CASES, LONG, SHARP, check_long, check_rival
from torch.testing import assert_close

from cosformer.mechanisms import whole
from cosformer.mechanisms.dense import linformer, synthesizer
from cosformer.mechanisms.dense.nystromformer import means
from cosformer.runtime import long_dtype


@pytest.fixture
def short(monkeypatch):
    """Long tensors stay in 16 bits, as they do on a GPU."""
    for module in (linformer, synthesizer, whole):
        monkeypatch.setattr(module, "long_dtype", lambda x: x.dtype)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_16_bits_are_a_few_roundings_from_float64(name, causal):
    dtype = torch.float16 if causal else torch.bfloat16
    check_rival(name, causal, 331, dtype, masked=causal, key_heads=2 if causal else 4)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("sharp", "dtype"), [(SHARP[0], torch.float16), (SHARP[1], torch.float32)], ids=str
)
def test_sinkhorn_takes_almost_all_from_a_block_that_is_not_full(sharp, dtype):
    check_rival("sinkhorn", False, 266, dtype, sharp=sharp)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("name", "causal"), LONG)
def test_no_tensor_as_long_as_the_inputs_is_wider_than_they_are(name, causal):
    check_long(name, causal)


def test_a_cpu_computes_in_float32_at_least():
    found = [long_dtype(torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    assert found == [torch.float32, torch.float64]


@pytest.mark.parametrize(("length", "count"), [(64, 8), (37, 8), (37, 37), (1001, 16)])
def test_means_of_16_bits_are_those_of_float32(length, count):
    x = draw(2, 3, length, 4).half()
    rounding = torch.finfo(torch.float32).eps
    assert_close(means(x, count), means(x.double(), count).float(), rtol=0, atol=4 * rounding)


def test_means_are_of_stretches_whose_lengths_differ_by_a_token():
    x = draw(2, 3, 11, 4)
    stretches = x.split([2, 3, 3, 3], 2)
    assert_close(means(x, 4), torch.stack([part.mean(2) for part in stretches], 2))
