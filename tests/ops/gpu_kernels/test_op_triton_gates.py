"""Decays per token by kernels, under Triton's interpreter: running sums, and the gradient of L."""

import pytest
import torch
from formula import results, tokens, uniform
from functorch.compile import make_boxed_func
from gate_cases import LEAST, LENGTHS, check_balanced, check_sums, draw
from gate_cases import results as gate_results
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

from cosformer import linear_attention
from cosformer.ops.autograd import gates, kernels
from cosformer.ops.autograd.gates import _RunningSum, summed_gates
from cosformer.ops.problem import running_sum

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_and_gradients_are_those_of_the_formula(length):
    check_sums(length, torch.float32)


def test_gates_may_be_of_16_bits_and_have_any_strides():
    check_sums(100, torch.float16, turned=True)


@pytest.mark.parametrize(("wrong", "place"), [(1e-3, 0), (torch.nan, 4095), (torch.inf, 4096)])
def test_a_gate_above_zero_is_refused_wherever_it_stands(wrong, place):
    given = draw(4100, torch.float32)
    given[1, 2, place] = wrong
    with pytest.raises(RuntimeError, match="log_decay must be at most 0"):
        _RunningSum.apply(given, LEAST)


def test_second_derivatives_are_those_of_the_formula():
    found = []
    for sums in (running_sum, _RunningSum.apply):
        leaf = draw(60, torch.float32).requires_grad_()
        (first,) = torch.autograd.grad(
            sums(leaf, LEAST).div(1e3).exp().sum(), leaf, create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert_close(*found)


def test_only_a_gpu_with_several_rows_is_given_to_the_kernel(monkeypatch):
    calls = []
    noted = staticmethod(lambda ctx, x, least: (calls.append(1), x.double())[1])
    monkeypatch.setattr(gates._RunningSum, "forward", noted)
    given = draw(10, torch.float32)
    summed_gates(given, torch.float32)
    assert not calls
    monkeypatch.setattr(gates, "kernels_serve", lambda x: True)
    summed_gates(given, torch.float32)
    assert calls == [1]
    summed_gates(given[:1, :1], torch.float32)
    assert calls == [1]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_the_gradient_of_a_decay_is_the_formula_in_float64(length, scale):
    check_balanced(length, scale)


@pytest.mark.parametrize("normaliser", ["none", "sum"])
def test_gates_have_the_same_gradient_by_either(normaliser, monkeypatch):
    q, k, v = (x.float() for x in tokens(1, 2, 20, kv_heads=1))
    served, found = [], []
    own = kernels.triton.balanced_decay_gradient
    monkeypatch.setattr(
        kernels.triton, "balanced_decay_gradient", lambda *x: (served.append(1), own(*x))[1]
    )

    def call(q, k, v, decay):
        return linear_attention(
            q.abs(), k.abs(), v, causal=True, normaliser=normaliser, log_decay=decay, impl="triton"
        )

    for kernel in (False, True):
        for room in (kernels, gates):
            monkeypatch.setattr(room, "kernels_serve", lambda x, kernel=kernel: kernel)
        found.append(results(call, [q, k, v, -uniform(1, 1, 20).float()]))
    assert served == [1]
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_the_operators_of_a_graph_hold_what_torch_asks_of_them():
    given = draw(60, torch.float32, turned=True)
    torch.library.opcheck(gates.gates_forward, (given, LEAST))
    grad = torch.ones(given.shape, dtype=torch.float64)
    torch.library.opcheck(gates.gates_backward, (given, LEAST, grad))


def test_a_graph_has_the_kernels_in_it_and_their_numbers(monkeypatch):
    """Of long rows inductor makes no running sums (PyTorch 2.11)."""
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    monkeypatch.setattr(gates, "kernels_know", lambda x: True)
    compiled = torch.compile(
        lambda x, least: summed_gates(x, torch.float32), backend=aot_autograd(fw_compiler=backend)
    )
    found, right = (gate_results(sums, draw(60, torch.float32)) for sums in (compiled, running_sum))
    assert_close(found, right)
    assert {name for name in seen if "gates" in name} == {
        "cosformer.gates_forward.default",
        "cosformer.gates_backward.default",
    }
    assert not [name for name in seen if "cumsum" in name]
