"""Kernels of projected and of rotated features on a GPU, against formulas in float64."""

import pytest
import torch
from projected_cases import (
    CASES,
    Case,
    no_worse,
    rotated_results,
    series_results,
)

from cosformer.ops.features import projected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLACK = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-3}
"""Of the norm: products of three tf32 ones have 21 bits."""
WIDE = {
    "performer": Case("exp", 266, 64),
    "performer, keys": Case("exp", 266, 64, relative=True),
    "wide performer": Case("exp", 621, 128),
    "rfa": Case("waves", 64, 64, 2),
    "wide rfa": Case("waves", 128, 128, 2),
    "arc-cosine": Case("relu", 128, 64, 2),
    "wide hedgehog": Case("softmaxes", 128, 128, 4),
}


@pytest.mark.parametrize("name", [*CASES, *WIDE])
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("length", [1, 63, 1000, 3000])
def test_features_and_gradients_are_those_of_the_formula(name, length, dtype):
    case = (CASES | WIDE)[name]
    x, weight, level, grad = (y if y is None else y.cuda() for y in case.draw(length))
    x = x.to(dtype)
    if not projected.is_served(x, case.rows, case.kind):
        pytest.skip("no room: the formula serves")
    given = [x, weight.float(), level, grad]
    right = case.results(projected.by_formula, *(y if y is None else y.double() for y in given))
    plain = case.results(projected.by_formula, *given)
    found = case.results(projected.by_kernel, *given)
    no_worse(found, plain, right, SLACK[dtype])
    for one, other in zip(case.results(projected.by_kernel, *given), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*CASES, *WIDE])
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("shares", [torch.float32, None], ids=["float32", "as x"])
@pytest.mark.parametrize("length", [1, 131, 3000])
def test_features_times_shares(name, length, shares, dtype):
    case = (CASES | WIDE)[name]
    x, weight, level, grad = (y if y is None else y.cuda() for y in case.draw(length))
    x = x.to(dtype)
    if not projected.is_served(x, case.rows, case.kind):
        pytest.skip("no room: the formula serves")
    given = [x, weight.float(), level, grad, case.shares(x).to(shares or dtype)]
    right = case.results(projected.by_formula, *(y if y is None else y.double() for y in given))
    plain = case.results(projected.by_formula, *given)
    found = case.results(projected.by_kernel, *given)
    no_worse(found, plain, right, SLACK[dtype])
    for one, other in zip(case.results(projected.by_kernel, *given), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["performer", "performer, keys", "rfa", "softmaxes", "relu"])
def test_weights_in_bfloat16(name):
    case, stored = (CASES | WIDE)[name], torch.bfloat16
    x, weight, level, grad = (y if y is None else y.cuda() for y in case.draw(1000))
    given = [x.to(stored), weight.to(stored), level, grad]
    right = case.results(projected.by_formula, *(y if y is None else y.double() for y in given))
    plain = case.results(projected.by_formula, *given)
    no_worse(case.results(projected.by_kernel, *given), plain, right, SLACK[stored])


def test_sines_and_cosines_are_those_of_float64():
    from sine_cases import check_sines  # which needs Triton

    check_sines("cuda")


@pytest.mark.parametrize("width", [2, 64, 128, 256])
@pytest.mark.parametrize("dtype", SLACK, ids=str)
def test_rotated_features_and_gradients_are_those_of_the_formula(width, dtype):
    generator = torch.Generator().manual_seed(5)
    for length in (1, 63, 1000):
        shape = (2, 2, length, 6, width)
        x, grad = torch.randn(*shape, generator=generator, dtype=torch.float64).cuda()
        no_worse(*rotated_results(x, grad, 10**6, dtype), SLACK[dtype])


@pytest.mark.parametrize(("width", "narrow"), [(64, 16), (128, 32), (10, 4), (5, 1), (16, None)])
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("length", [1, 63, 3000])
def test_series_and_gradients_are_those_of_the_formula(width, narrow, length, dtype):
    if width > projected.MAX_WIDTHS[dtype]:
        pytest.skip("no room: the formula serves")
    no_worse(*series_results([2, length, 3, width], narrow, dtype), SLACK[dtype])


def test_series_of_weights_in_bfloat16():
    stored = torch.bfloat16
    no_worse(*series_results([2, 1000, 3, 64], 16, torch.bfloat16, stored), SLACK[stored])
