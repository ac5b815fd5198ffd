"""Gradients of a formula inside an autograd function: counted once, whoever depends on whom."""

import pytest
import torch
from torch.autograd import Function, gradgradcheck

from cosformer.ops.features.formula import formula_gradients


def formula(x, y, z):
    return (x * y.sin() + z).exp()


class Formula(Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return formula(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return tuple(formula_gradients(formula, ctx.saved_tensors, ctx.needs_input_grad, grad))


def draw(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64).unbind()


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x, y: (x, y, x + y),
        lambda x, y: (x, x, y),
        lambda x, y: (x, x.tanh(), y * x),
        lambda x, y: (x.detach(), y, y.detach()),
    ],
)
@pytest.mark.parametrize("graph", [True, False])
def test_inputs_may_be_or_follow_from_others(inputs, graph):
    leaves = [x.requires_grad_() for x in draw(2)]

    def slopes(call):
        out = call(*inputs(*leaves)).sum()
        return torch.autograd.grad(out, leaves, create_graph=graph, allow_unused=True)

    for found, right in zip(slopes(Formula.apply), slopes(formula), strict=True):
        assert (found is None) == (right is None)
        assert found is None or torch.allclose(found, right, rtol=1e-12)
        assert found is None or found.requires_grad == graph


def test_second_derivatives_of_one_that_is_all():
    (x,) = draw(1)
    gradgradcheck(lambda x: Formula.apply(x, x, x.sin()), [0.3 * x.requires_grad_()])
