"""Kernels of rotary features over their denominators on a GPU, against the formula in float64."""

import pytest
import torch
from divided_cases import CASES, Case, divided_results, draw
from projected_cases import no_worse

from cosformer.ops import divided

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLACK = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""Of the norm: sines are rough for 16 bits."""
WIDE = {
    "many heads": Case(64, 9, masked=True),
    "one head of keys": Case(64, 1, 16),
    "full width": Case(128, 4, 2, masked=True),
}


@pytest.mark.parametrize("name", [*CASES, *WIDE])
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("length", [1, 63, 1000, 5000])
def test_features_and_gradients_are_those_of_the_formula(name, length, dtype):
    given = draw((CASES | WIDE)[name], length, dtype)
    found, plain, right = divided_results(given)
    no_worse(found, plain, right, SLACK[dtype])
    for one, other in zip(given.results(divided.by_kernel), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", SLACK, ids=str)
def test_the_future_changes_no_bit_of_the_past(dtype):
    given = draw(CASES["usual"], 1000, dtype)
    right, _ = given.features(divided.by_kernel, given.q, given.k)
    for past in (10, 64, 500):
        k = given.k.clone()
        k[:, :, past:] = 1e6
        found, _ = given.features(divided.by_kernel, given.q, k)
        assert torch.equal(found[:, :, :past], right[:, :, :past])


@pytest.mark.parametrize("dtype", SLACK, ids=str)
def test_poison_behind_the_mask_reaches_nothing(dtype):
    given = draw(WIDE["many heads"], 300, dtype)
    hidden = ~given.key_mask[:, None, :, None]
    clean, poisoned = (
        given._replace(k=given.k.masked_fill(hidden, value)).results(divided.by_kernel)
        for value in (0.0, torch.nan)
    )
    for one, other in zip(clean, poisoned, strict=True):
        assert torch.equal(one, other)
