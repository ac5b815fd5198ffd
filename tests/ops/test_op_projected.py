"""Kernels of projected and of rotated features, under Triton's interpreter, against formulas."""

import pytest
import torch
from asked_cases import gradients
from projected_cases import CASES, no_worse, rotated_results, series_results
from torch.testing import assert_close

from cosformer.ops import series
from cosformer.ops.features import projected
from cosformer.ops.features import rotary as rotation

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")


each_case = pytest.mark.parametrize("name", CASES)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 63, 1000])
def test_features_and_gradients_are_those_of_the_formula(name, length, dtype):
    case = CASES[name]
    x, weight, level, grad = case.draw(length, heads=4 if length < 100 else 2, batch=2)
    if case.weights == 4 and length > 100:
        weight = weight[:2]
    given = [x.to(dtype), weight.to(dtype), level, grad]
    right = case.results(projected.by_formula, *(y if y is None else y.double() for y in given))
    plain = case.results(projected.by_formula, *given)
    no_worse(case.results(projected.by_kernel, *given), plain, right)


@each_case
def test_rows_are_padded_with_zeros_to_multiples_of_16_bytes(name):
    case = CASES[name]
    x, weight, level, grad = (y if y is None else y.float() for y in case.draw(9))
    found = projected.by_kernel(x, weight, case.kind, level)
    assert found.shape[-1] % projected.ALIGNED == 0
    assert found.shape[-1] - grad.shape[-1] < projected.ALIGNED
    assert (found[..., grad.shape[-1] :] == 0).all()


@each_case
def test_any_strides_give_the_same_numbers_every_time(name):
    case = CASES[name]
    given = [y if y is None else y.float() for y in case.draw(67, batch=1)]
    right = case.results(projected.by_kernel, *given)
    strided = [
        None if y is None else y.transpose(1, 2).contiguous().transpose(1, 2)
        for y in (given[0], given[2], given[3])
    ]
    for _ in range(2):
        found = case.results(projected.by_kernel, strided[0], given[1], *strided[1:])
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one, other)


@each_case
def test_second_derivatives_are_those_of_the_formula(name):
    case = CASES[name]
    x, weight, level, grad = (y if y is None else y.float() for y in case.draw(5))
    found = []
    for made in (projected.by_formula, projected.by_kernel):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_(), grad.clone()]
        leaves[2].requires_grad_()
        out = made(leaves[0], leaves[1], case.kind, level)[..., : grad.shape[-1]]
        first = torch.autograd.grad(out, leaves[:2], leaves[2], create_graph=True)
        found.append(torch.autograd.grad(sum(y.square().sum() for y in first), leaves))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["relu", "waves"])
def test_what_is_not_a_number_stays_so(name):
    case = CASES[name]
    x, weight, level, _ = (y if y is None else y.float() for y in case.draw(9))
    x[0, 0, 3, 1] = torch.nan
    for made in (projected.by_formula, projected.by_kernel):
        found = made(x, weight, case.kind, level)
        assert found[0, 0, 3, 0].isnan()
        assert found[0, 0, :3].isfinite().all()


def test_only_what_is_asked_for_has_a_gradient():
    case = CASES["softmaxes"]
    x, weight, _, _ = (y if y is None else y.float() for y in case.draw(5))
    weight.requires_grad_()
    out = projected.by_kernel(x, weight, case.kind)
    (one,) = torch.autograd.grad(out.square().sum(), [weight])
    right = projected.by_formula(x, weight, case.kind)
    assert_close(one, torch.autograd.grad(right.square().sum(), [weight])[0])


def test_rows_of_zeros_have_the_gradients_of_the_formula():
    case = CASES["waves"]
    x, weight, level, grad = (y if y is None else y.float() for y in case.draw(5))
    x[:, :, 2] = 0
    found = case.results(projected.by_kernel, x, weight, level, grad)
    right = case.results(projected.by_formula, x, weight, level, grad)
    for one, other in zip(found, right, strict=True):
        assert_close(one[..., : other.shape[-1]], other, rtol=1e-4, atol=1e-5)


def test_the_largest_exponents_alone(monkeypatch):
    x, weight, _, _ = (y if y is None else y.float() for y in CASES["exponentials"].draw(63))
    right = projected.top_exponents(x, weight)
    monkeypatch.setattr(projected, "is_served", projected.fits)
    assert_close(projected.top_exponents(x, weight), right)


def test_sines_and_cosines_are_those_of_float64():
    from sine_cases import check_sines  # which needs Triton

    check_sines("cpu")


def test_angles_of_any_size_have_finite_features_and_gradients():
    case = CASES["waves"]
    x, weight, level, grad = (y if y is None else y.float() for y in case.draw(9))
    for size in (1e4, 1e9, 1e30):
        features, *slopes = case.results(projected.by_kernel, x, weight * size, level, grad)
        assert (features.abs() <= 1).all()
        assert all(y.isfinite().all() for y in slopes)


@pytest.mark.parametrize("start", [0, 10**6, torch.tensor([3, 70000])], ids=str)
@pytest.mark.parametrize("width", [2, 6, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rotated_features_and_gradients_are_those_of_the_formula(start, width, dtype):
    generator = torch.Generator().manual_seed(5)
    for length in (1, 63):
        x, grad = torch.randn(2, 2, length, 5, width, generator=generator, dtype=torch.float64)
        no_worse(*rotated_results(x, grad, start, dtype))


def test_second_derivatives_of_rotated_features_are_those_of_the_formula():
    x = torch.randn(1, 2, 5, 6, generator=torch.Generator().manual_seed(5))
    found = []
    for made in (rotation.by_formula, rotation.by_kernel):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(made(leaf, 7, 1e4).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert found[0].any()
    assert_close(found[1], found[0])


SERIES = [(10, 4, 600), (64, 16, 33), (3, 1, 63), (40, 32, 1), (16, None, 63)]
"""Widths of x, and of what it is projected to; lengths."""


@pytest.mark.parametrize(("width", "narrow", "length"), SERIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_series_and_gradients_are_those_of_the_formula(width, narrow, length, dtype):
    found = series_results([2, length, 2, width], narrow, dtype)
    columns = series.series_width(narrow or width)
    assert found[0][0].shape[-1] % projected.ALIGNED == 0
    assert (found[0][0][..., columns:] == 0).all()
    no_worse(*found)


@pytest.mark.parametrize("narrow", [1, 2, 5, 16])
def test_rows_of_the_series_multiply_to_it(narrow):
    x, y = torch.randn(2, 1, 2, 7, narrow, generator=torch.Generator().manual_seed(5))
    found = (series.by_formula(x, None) * series.by_formula(y, None)).sum(-1)
    assert series.by_formula(x, None).shape[-1] == series.series_width(narrow)
    s = (x * y).sum(-1) / narrow**0.5
    assert_close(found, 1 + s + s.square() / 2)


@pytest.mark.parametrize("asked", [(True, False), (False, True)], ids=str)
def test_weights_of_the_series_are_summed_for_where_they_learn(asked, monkeypatch):
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(s, generator=generator) for s in ((1, 2, 70, 3), (2, 3, 2)))
    summed, own = [], series._gradients
    monkeypatch.setattr(series, "_gradients", lambda *a: (summed.append(a[3]), own(*a))[1])
    full, found = (gradients(series.by_kernel, (x, weight), each) for each in ((True, True), asked))
    assert summed == [True, asked[1]]
    for one, right, each in zip(found, full, asked, strict=True):
        assert torch.equal(one, right) if each else one is None


def test_second_derivatives_of_the_series_are_those_of_the_formula():
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(s, generator=generator) for s in ((1, 2, 5, 3), (2, 3, 2)))
    found = []
    for made in (series.by_formula, series.by_kernel):
        leaves = [y.clone().requires_grad_() for y in (x, weight)]
        first = torch.autograd.grad(made(*leaves).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(y.square().sum() for y in first), leaves))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
