"""Logarithms of gates by their kernel, under Triton's interpreter, against the formula."""

import pytest
import torch
from gates_cases import DTYPES, check_log_sigmoid
from torch.testing import assert_close

from cosformer.ops import log_sigmoid

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", [1, 100, 1024, 2500])  # blocks of 1024
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_as_exact_as_torch(length, dtype, turned):
    check_log_sigmoid(length, dtype, 16.0, turned=turned)


def test_ends_and_what_is_not_a_number():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0]).view(1, 1, 4).requires_grad_()
    found, right = (made(x, 1.0) for made in (log_sigmoid.by_kernel, log_sigmoid.by_formula))
    assert_close(found, right, equal_nan=True)
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (found, right))
    assert_close(*slopes, equal_nan=True)


def test_second_derivatives_are_those_of_the_formula():
    found = []
    for made in (log_sigmoid.by_formula, log_sigmoid.by_kernel):
        leaf = torch.linspace(-3, 3, 40).view(1, 2, 20).requires_grad_()
        (first,) = torch.autograd.grad(made(leaf, 4.0).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert found[0].any()
    assert_close(*found)


def test_a_gpu_is_given_to_the_kernel(monkeypatch):
    monkeypatch.setattr(log_sigmoid, "by_kernel", lambda *given: "kernel")
    x = torch.zeros(1, 2, 3)
    assert log_sigmoid.log_sigmoid(x).shape == x.shape
    monkeypatch.setattr(log_sigmoid, "kernels_serve", lambda x: True)
    assert log_sigmoid.log_sigmoid(x) == "kernel"
