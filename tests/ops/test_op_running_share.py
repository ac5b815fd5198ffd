"""Shares in the sums of columns so far, by their kernels under Triton's interpreter."""

import pytest
import torch
from running_share_cases import SCALES, check_shares
from torch.testing import assert_close

from cosformer.ops import running_share


@pytest.mark.usefixtures("interpreted", "poisoned")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [1, 7, 8, 21])
def test_kernels_are_as_exact_as_torch(size, scale, monkeypatch):
    monkeypatch.setattr(running_share, "ROWS", 8)
    monkeypatch.setattr(running_share, "COLUMNS", 4)
    check_shares(size, scale)


def test_the_formula_is_what_it_says():
    x = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = running_share.by_formula(x)
    for row in range(5):
        for column in range(row + 1):
            sums = x[:, column : row + 1, column].logsumexp(1)
            assert_close(found[:, row, column], x[:, row, column] - sums)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("turned", [False, True])
def test_second_derivatives_are_those_of_the_formula(turned):
    found = []
    for made in (running_share.by_formula, running_share.by_kernel):
        leaf = torch.linspace(-3, 3, 49).view(1, 7, 7).requires_grad_()
        out = made(leaf.mT if turned else leaf).exp()
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert found[0].any()
    assert_close(*found)


@pytest.mark.usefixtures("interpreted")
def test_cells_may_be_more_than_32_bits_count():
    from cell_cases import check_cells  # which needs Triton

    check_cells()


def test_a_gpu_is_given_to_the_kernel(monkeypatch):
    monkeypatch.setattr(running_share, "by_kernel", lambda *given: "kernel")
    x = torch.zeros(1, 3, 3)
    assert running_share.running_share(x).shape == x.shape
    monkeypatch.setattr(running_share, "kernels_serve", lambda x: True)
    assert running_share.running_share(x) == "kernel"
