"""Features of projections and of positions: their formulas, ranges and gradients."""

import pytest
import torch
from torch.testing import assert_close

from cosformer.ops.features import PARTS, projected, rotate, rotated_features, top_exponents
from cosformer.ops.problem import FEATURE_MAPS


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_a_feature_map_in_memory_and_its_gradient_are_those_of_the_formula_at_zero_too(name):
    phi = FEATURE_MAPS[name]
    x = torch.tensor([-torch.inf, -800.0, -1.0, -0.0, 0.0, 1e-30, 2.0, 800.0]).double()
    x = x[1:] if name == "silu" else x  # -inf · 0
    x.requires_grad_()
    made, grad = phi.forward(x), torch.linspace(1, 2, len(x)).double()
    assert_close(phi.into(x.detach(), out=torch.full_like(x, torch.nan)), made.detach())
    assert_close(*torch.autograd.grad(made, x, grad), phi.backward(grad, x.detach()))


FORMULAS = {
    "exp": lambda x, turned: (turned - x.square().sum(-1, keepdim=True) / 2).exp(),
    "waves": lambda x, turned: torch.cat([turned.sin(), turned.cos()], -1),
    "relu": lambda x, turned: turned.clamp(min=0),
}


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("weights", [None, 1, 2, 4])
def test_features_are_what_the_formula_says(kind, weights):
    x, weight = normal(2, 4, 9, 16), normal(*([] if weights is None else [weights]), 5, 16, seed=1)
    found = projected(x, weight, kind, torch.zeros(2, 4, 9).double())
    y = x / 2 if kind == "exp" else x / x.norm(dim=-1, keepdim=True)  # 16^¼ is 2
    each = weight if weights is None else weight.repeat_interleave(4 // weights, 0)
    assert_close(found, FORMULAS[kind](y, y @ each.mT) / 5**0.5)
    assert found.shape[-1] == 5 * PARTS[kind]


def test_softmaxes_are_of_both_signs():
    x, weight = normal(2, 4, 9, 6), normal(2, 7, 6, seed=1)
    turned = x @ weight.repeat_interleave(2, 0).mT
    right = torch.cat([turned.softmax(-1), (-turned).softmax(-1)], -1)
    assert_close(projected(x, weight, "softmaxes"), right)


def test_exponentials_are_relative_to_a_level_or_to_the_largest_of_each_token():
    x, weight, level = 9 * normal(1, 2, 5, 6), normal(11, 6, seed=1), normal(1, 2, 5, seed=2)
    assert_close(projected(x, weight, "exp").amax(-1), torch.full((1, 2, 5), 11**-0.5).double())
    tops = top_exponents(x, weight)
    relative = projected(x, weight, "exp", tops + level)
    assert_close(relative.amax(-1), (-level).exp() / 11**0.5)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_rounded_once(kind, dtype):
    x, weight = normal(1, 2, 33, 8).to(dtype), normal(5, 8, seed=1).float()
    found, right = projected(x, weight, kind), projected(x.double(), weight.double(), kind)
    far = kind == "exp" and dtype == torch.float16
    assert found.dtype == (torch.float32 if far else dtype)
    assert_close(found.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("kind", PARTS)
def test_rows_of_zeros_and_of_any_size_have_finite_gradients(kind):
    for size in (0.0, 1e4, 1e30) if kind != "exp" else (0.0, 1e4):
        x = (size * normal(1, 2, 5, 6)).float().requires_grad_()
        weight = normal(3, 6, seed=1).float().requires_grad_()
        out = projected(x, weight, kind)
        for slope in (out, *torch.autograd.grad(out.square().sum(), (x, weight))):
            assert slope.isfinite().all()


@pytest.mark.parametrize("kind", PARTS)
def test_gradients_and_second_derivatives_are_those_of_finite_differences(kind):
    x, weight = normal(1, 2, 3, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_()
    level = normal(1, 2, 3, seed=2) if kind == "exp" else None

    def features(x, weight):
        return projected(x, weight, kind, level)

    assert torch.autograd.gradcheck(features, (x, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(features, (x, weight), fast_mode=True)


@pytest.mark.parametrize("start", [0, 10**6, torch.tensor([3, 70000])], ids=str)
def test_rotated_features_are_turned_by_their_positions(start):
    x = normal(2, 3, 5, 6)
    found = rotated_features(x, start, 1e4)
    features = torch.nn.functional.elu(x) + 1
    first = torch.as_tensor(start).reshape(-1, 1) + torch.arange(5)
    angle = first[:, None, :, None] * 1e4 ** (-torch.arange(0, 6, 2).double() / 6)
    even, odd = features[..., 0::2], features[..., 1::2]
    assert_close(found[..., 0::2], even * angle.cos() - odd * angle.sin(), rtol=1e-6, atol=1e-6)
    assert_close(found[..., 1::2], even * angle.sin() + odd * angle.cos(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shift", [0, 1])
def test_rotations_are_the_same_in_a_graph_and_from_anywhere_in_memory(shift):
    memory = torch.randn(2 * 3 * 5 * 6 + 1, dtype=torch.float64)
    x = memory[shift : shift + 180].view(2, 3, 5, 6)
    position = torch.arange(5)[None]
    compiled = torch.compile(rotate, backend="eager", fullgraph=True)
    assert_close(compiled(x, position), rotate(x, position))
    assert_close(rotate(x.mT.contiguous().mT, position), rotate(x, position))
