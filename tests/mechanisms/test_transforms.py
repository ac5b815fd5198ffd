"""torch.func over the whole table: segments, blocks and sorted chunks have gradients there too."""

import pytest
import torch
from mechanism_cases import CASES, cases_where, make, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from cosformer.mechanisms.patterns import blocked, reformer

PIECEWISE = ("performer", "local", "longformer", "sparse", "sparse-strided", "bigbird", "reformer")


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(blocked, "SLICE", 500)
    monkeypatch.setitem(reformer.SLICE, "cpu", 500)


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_functional_gradients_are_those_of_autograd(name, causal):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)

    def loss(q, k, v):
        return mechanism(q, k, v, causal=causal, controls=controls)[0].sin().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    assert_close(found, right)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's attention
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_jacobians_are_those_of_autograd(name, causal):
    mechanism = make(name, heads=1, width=4)
    q, k, v, controls = tokens(mechanism, 7, batch=1)

    def output(q, k, v):
        return mechanism(q, k, v, causal=causal, controls=controls)[0]

    found = torch.func.jacrev(output, argnums=(0, 1, 2))(q, k, v)
    right = torch.autograd.functional.jacobian(output, (q, k, v))
    assert_close(found, right)


@pytest.mark.parametrize(("name", "causal"), cases_where(state=("window", "cache", "none")))
def test_second_derivatives_are_those_of_finite_differences(name, causal):
    mechanism = make(name, heads=1, width=4)
    q, k, v, _ = tokens(mechanism, 9, batch=1)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def attend(q, k, v):
        return mechanism(q, k, v, causal=causal)[0]

    if mechanism.traits.second_derivative:
        assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)
        return
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap's own, in gradients
@pytest.mark.parametrize("randomness", ["error", "different"])  # a seed alone decides
@pytest.mark.parametrize("name", PIECEWISE)
def test_gradients_of_each_example_alone(name, randomness):
    mechanism = make(name)
    q, k, v, _ = tokens(mechanism, 20)

    def loss(q, k, v):
        return mechanism(q, k, v)[0].sin().sum()

    examples = [torch.stack([x, 0.5 * x]) for x in (q, k, v)]
    per_example = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), randomness=randomness)
    found = per_example(*examples)
    for n in range(2):
        alone = torch.func.grad(loss, argnums=(0, 1, 2))(*(x[n] for x in examples))
        assert_close([x[n] for x in found], list(alone))


@pytest.mark.parametrize("name", ["local", "reformer"])
def test_second_derivatives_by_transforms_are_those_of_autograd(name):
    mechanism = make(name, heads=1, width=3)
    q, k, v, _ = tokens(mechanism, 9, batch=1)

    def loss(v):
        return mechanism(q + v, k, v, causal=True)[0].sin().sum()

    def of_gradient(v):
        (grad,) = torch.autograd.grad(loss(v), v, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), v)[0]

    found = torch.func.grad(lambda v: torch.func.grad(loss)(v).square().sum())(v)
    assert_close(found, of_gradient(v.requires_grad_()))
