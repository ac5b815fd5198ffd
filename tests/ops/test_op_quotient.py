"""Sums of parts over totals by the kernel, under Triton's interpreter, against the formula."""

import pytest
import torch
from projected_cases import no_worse
from torch.testing import assert_close

from cosformer.ops.features import quotient
from cosformer.ops.problem.normaliser import SUM_RULES

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")
EPS = 0.3
SHAPES = {"behind": (3, 13, 0), "apart": (2, 5, 8), "one": (1, 5, 1)}
"""Parts, their width, the width of totals; 5 columns are divided."""


def draw(parts, width, total_width, rule, length=63):
    """The division and its tensors, some of their totals within eps of 0."""
    generator = torch.Generator().manual_seed(2)
    widths = [width] * parts + [total_width] * (parts if total_width else 0)
    tensors = [
        torch.randn(2, length, 3, n, generator=generator, dtype=torch.float64).transpose(1, 2)
        for n in widths
    ]
    return quotient.Division(parts, 5, rule, EPS), tensors


def results(divide, division, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = divide(division, *leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", SUM_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quotients_and_gradients_are_those_of_the_formula(shape, rule, dtype):
    division, tensors = draw(*SHAPES[shape], rule)
    given = [x.to(dtype) for x in tensors]
    if rule == "add":  # or some of the sums are divided by almost nothing
        given[-1] = given[-1].abs() + 3
    right = results(quotient.by_formula, division, [x.double() for x in given])
    plain = results(quotient.by_formula, division, given)
    found = results(quotient.by_kernel, division, given)
    no_worse(found, plain, right, 1e-3 if dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_second_derivatives_are_those_of_the_formula(shape):
    division, tensors = draw(*SHAPES[shape], "signed", length=4)
    found = []
    for divide in (quotient.by_formula, quotient.by_kernel):
        leaves = [x.float().requires_grad_() for x in tensors]
        out = divide(division, *leaves)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_totals_in_float32_have_such_a_gradient():
    division, tensors = draw(*SHAPES["apart"], "clamp")
    given = [x.half() for x in tensors[:2]] + [x.float() for x in tensors[2:]]
    right = results(quotient.by_formula, division, [x.double() for x in given])
    plain = results(quotient.by_formula, division, given)
    found = results(quotient.by_kernel, division, given)
    assert [x.dtype for x in found[3:]] == [torch.float32] * 2
    no_worse(found, plain, right, 1e-3)
