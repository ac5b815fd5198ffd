"""Running sums of gates by the kernel, under Triton's interpreter, against the formula."""

import pytest
import torch
from gates_cases import DTYPES, FLOOR, LENGTHS, check_sums, draw
from kernel_cases import results
from op_formula import tokens, uniform

from cosformer import linear_attention
from cosformer.ops.autograd import gates

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_gradients_are_those_of_the_formula(length, dtype, turned):
    check_sums(length, dtype, turned=turned)


@pytest.mark.parametrize("wrong", [1e-3, torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 4999])
def test_a_gate_above_zero_is_refused_wherever_it_stands(wrong, place):
    given = draw(5000, torch.float32)
    given[1, 2, place] = wrong
    with pytest.raises(RuntimeError, match="log_decay must be at most 0"):
        gates.by_kernel(given, FLOOR)


def test_a_sum_over_many_blocks_loses_nothing():
    given = torch.full((1, 2, 20_000), -0.1)
    exact = given[0, 0, 0].double() * torch.arange(1, 20_001)
    torch.testing.assert_close(gates.by_kernel(given, FLOOR)[0, 1], exact, rtol=1e-13, atol=0)


def test_second_derivatives_are_those_of_the_formula():
    found = []
    for sums in (gates.by_formula, gates.by_kernel):
        leaf = draw(60, torch.float32).requires_grad_()
        (first,) = torch.autograd.grad(
            sums(leaf, FLOOR).div(1e3).exp().sum(), leaf, create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_only_a_gpu_with_several_rows_is_given_to_the_kernel(monkeypatch):
    monkeypatch.setattr(gates, "by_kernel", lambda *given: "kernel")
    given = draw(10, torch.float32)
    assert gates.running(given, FLOOR).dtype == torch.float64
    monkeypatch.setattr(gates, "kernels_serve", lambda x: True)
    assert gates.running(given, FLOOR) == "kernel"
    assert gates.running(given[:1, :1], FLOOR).dtype == torch.float64


def test_attention_is_the_same_by_either(monkeypatch):
    q, k, v = (x.float() for x in tokens(2, 4, 70, kv_heads=2))

    def call(q, k, v, decay):
        return linear_attention(q, k, v, causal=True, normaliser="none", log_decay=decay)

    found = []
    for kernel in (False, True):
        monkeypatch.setattr(gates, "kernels_serve", lambda x, kernel=kernel: kernel)
        found.append(results(call, [q, k, v, -uniform(2, 2, 70).float()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
