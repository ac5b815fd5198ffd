"""Features times a factor for every token, under Triton's interpreter, against the formula."""

import pytest
import torch
from asked_cases import gradients
from projected_cases import CASES, no_worse
from torch.testing import assert_close

from cosformer.ops.features import projected

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")

each_case = pytest.mark.parametrize("name", CASES)


def drawn(case, length, dtype=torch.float32, **sizes):
    """x, W, level, a gradient, shares."""
    given = [y if y is None else y.to(dtype) for y in case.draw(length, **sizes)]
    return [*given, case.shares(given[0])]


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_features_and_gradients_are_those_of_the_formula(name, dtype):
    case = CASES[name]
    given = drawn(case, 131, dtype, batch=1)
    right = case.results(projected.by_formula, *(y if y is None else y.double() for y in given))
    plain = case.results(projected.by_formula, *given)
    no_worse(case.results(projected.by_kernel, *given), plain, right)


@each_case
def test_they_are_rounded_once(name):
    case = CASES[name]
    *given, share = drawn(case, 1, torch.float16)
    given[1] = given[1].float()
    found = case.results(projected.by_kernel, *given, share.float())
    right = case.results(projected.by_formula, *(y if y is None else y.double() for y in given))[0]
    right = right * share[..., None].double()
    spacing = 2.0**-11 if found[0].dtype == torch.float16 else 2.0**-20
    assert_close(found[0][..., : right.shape[-1]].double(), right, rtol=1.1 * spacing, atol=1e-7)
    assert found[-1].dtype == torch.float32


@each_case
def test_padding_does_not_count(name):
    case = CASES[name]
    x, weight, level, grad, share = drawn(case, 9, batch=1)
    leaves = [y.requires_grad_() for y in (x, share)]
    out = projected.by_kernel(x, weight, case.kind, level, share)
    found = []
    for beyond in (0.0, torch.nan):
        wide = out.new_full(out.shape, beyond)
        wide[..., : grad.shape[-1]] = grad
        found.append(torch.autograd.grad(out, leaves, wide, retain_graph=True))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@each_case
def test_any_strides_give_the_same_numbers(name):
    case = CASES[name]
    *given, share = drawn(case, 5)
    right = case.results(projected.by_kernel, *given, share)
    turned = share.transpose(1, 2).contiguous().transpose(1, 2)
    for one, other in zip(case.results(projected.by_kernel, *given, turned), right, strict=True):
        assert torch.equal(one, other)
    same = share[:, :1, :1].expand_as(share)
    found, whole = (case.results(projected.by_kernel, *given, y) for y in (same, same.clone()))
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other)


@each_case
def test_second_derivatives_are_those_of_the_formula(name):
    case = CASES[name]
    x, weight, level, grad, share = drawn(case, 5, batch=1)
    found = []
    for made in (projected.by_formula, projected.by_kernel):
        leaves = [y.clone().requires_grad_() for y in (x, weight, share, grad)]
        out = made(leaves[0], leaves[1], case.kind, level, leaves[2])[..., : grad.shape[-1]]
        first = torch.autograd.grad(out, leaves[:3], leaves[3], create_graph=True)
        found.append(torch.autograd.grad(sum(y.square().sum() for y in first), leaves))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "asked", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_what_is_asked_for_has_a_gradient(asked, monkeypatch):
    case = CASES["waves"]
    x, weight, _, _, share = drawn(case, 5)
    passed, own = [], projected.gradients
    monkeypatch.setattr(
        projected, "gradients", lambda *a: (passed.append((a[5], a[7])), own(*a))[1]
    )

    def features(x, weight, share):
        return projected.by_kernel(x, weight, case.kind, None, share)

    full, found = (gradients(features, (x, weight, share), each) for each in ([True] * 3, asked))
    assert passed == [(True, True), asked[1:]]
    for one, right, each in zip(found, full, asked, strict=True):
        assert torch.equal(one, right) if each else one is None
