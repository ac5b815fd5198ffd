"""Kernels of sums of sines with noise on a GPU, against the formula in float64."""

import pytest
import torch
from asked_cases import check_choices
from mixed_cases import CASES, Case, draw, mixed_results
from projected_cases import no_worse

from cosformer.ops import sines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLACK = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-3}
"""Of the norm: products of three tf32 ones have 21 bits."""
WIDE = {
    "usual": Case(64, 5, 256),
    "wide": Case(128, 5, 256),
    "wide, odd": Case(100, 3, 130, heads=4),
    "few columns": Case(64, 5, 64, heads=8),
}


@pytest.mark.parametrize("name", [*CASES, *WIDE])
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("length", [1, 63, 100, 1000, 3000])
def test_sums_and_gradients_are_those_of_the_formula(name, length, dtype):
    given = draw((CASES | WIDE)[name], length, dtype)
    if not sines.is_served(given.x):
        pytest.skip("no room: the formula serves")
    found, plain, right = mixed_results(given)
    no_worse(found, plain, right, SLACK[dtype])
    for one, other in zip(given.results(sines.by_kernel), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", SLACK, ids=str)
def test_only_gradients_that_are_asked_for_are_made(dtype):
    given = draw(WIDE["usual"], 300, dtype)
    check_choices(lambda *y: given.mixed(sines.by_kernel, *y), [given.x, *given.sines])


def test_long_sequences_go_in_segments(monkeypatch):
    given = draw(CASES["grouped"], 3000, torch.bfloat16)
    right = given.results(sines.by_kernel)
    monkeypatch.setattr(sines, "TABLE", 2**18)
    for one, other in zip(given.results(sines.by_kernel)[:2], right[:2], strict=True):
        assert torch.equal(one, other)
