"""Random features are those of their kernels, in the mean."""

import pytest
import torch
from mechanism_cases import draw, make
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.mechanisms.linear.based import series
from cosformer.mechanisms.linear.performer import orthogonal_rows


def kernel(name, **options):
    """φ(q)·φ(k) of some mechanism, with the factor that it takes from queries put back."""
    mechanism = make(name, width=4, features=30_000, **options)
    q, k = 0.6 * draw(1, 2, 5, 4), 0.6 * draw(1, 2, 5, 4, seed=1)
    with torch.no_grad():
        for scale in mechanism.parameters():
            scale.fill_(1)
        return q, k, mechanism.queries(q, 0) @ mechanism.keys(k, 0).mT


def test_performer_has_the_kernel_of_softmax():
    q, k, found = kernel("performer")
    right = (q @ k.mT / 2).exp()
    scale = found.sum(-1, keepdim=True) / right.sum(-1, keepdim=True)  # one number per query
    assert_close(found / scale, right, rtol=0.05, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rfa_has_the_gaussian_kernel_of_unit_vectors(temperature):
    q, k, found = kernel("rfa", temperature=temperature)
    distance = torch.cdist(F.normalize(q, dim=-1), F.normalize(k, dim=-1))
    assert_close(found, (-(distance**2) / (2 * temperature**2)).exp(), rtol=0, atol=0.03)


def test_rfa_arccos_has_the_arc_cosine_kernel_of_unit_vectors():
    q, k, found = kernel("rfa-arccos")
    cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    angle = cosine.acos()
    right = (angle.sin() + (torch.pi - angle) * cosine) / (2 * torch.pi)
    assert_close(found, right, rtol=0, atol=0.02)


def estimates(draw_rows):
    """φ(q)·φ(k) / exp(q·k) for many draws of eight directions: 1 in the mean."""
    q, k = 0.4 * draw(20, 8), 0.4 * draw(20, 8, seed=1)
    rows = torch.stack([draw_rows() for _ in range(1500)]).double()  # [1500, 8, 8]
    q_features, k_features = (
        (x @ rows.mT - x.square().sum(-1, keepdim=True) / 2).exp() for x in (q, k)
    )
    return q_features @ k_features.mT / 8 / (q @ k.mT).exp()


def test_orthogonal_directions_are_right_in_the_mean_and_vary_less_than_independent_ones():
    generator = torch.Generator().manual_seed(0)
    orthogonal = estimates(lambda: orthogonal_rows(8, 8, generator))
    independent = estimates(lambda: torch.randn(8, 8, generator=generator))
    assert (orthogonal.mean(0) - 1).abs().mean() < 0.04
    assert orthogonal.var(0).mean() < 0.8 * independent.var(0).mean()


@pytest.mark.parametrize("narrow", [1, 2, 5, 16])
def test_rows_of_the_series_multiply_to_it(narrow):
    x, y = draw(2, 1, 2, 7, narrow, seed=5)
    found = (series(x, None) * series(y, None)).sum(-1)
    assert series(x, None).shape[-1] == (narrow + 1) * (narrow + 2) // 2
    s = (x * y).sum(-1) / narrow**0.5
    assert_close(found, 1 + s + s.square() / 2)
