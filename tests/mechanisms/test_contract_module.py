"""The contract of a mechanism as a module: precision, autocast, checkpoints, draws, costs."""

import copy

import pytest
import torch
from mechanism_cases import CASES, HEADS, NAMES, WIDTH, make, names_where, tokens

from cosformer.mechanisms import GROWTH, MECHANISMS

every_case = pytest.mark.parametrize(("name", "causal"), CASES)
every_name = pytest.mark.parametrize("name", NAMES)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_is_the_same_attention(name, causal, dtype):
    exact = make(name)
    mechanism = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(mechanism.state_dict())  # the same rounded parameters
    q, k, v, controls = tokens(mechanism, dtype=dtype)
    out, _ = mechanism(q, k, v, causal=causal, controls=controls)
    assert out.dtype == dtype
    right, _ = exact(q.double(), k.double(), v.double(), causal=causal,
                     controls={key: x.double() for key, x in controls.items()})  # fmt: skip
    error = (out.double() - right).abs().max() / right.abs().max()
    assert error < 100 * torch.finfo(dtype).eps


@every_case
def test_autocast_is_the_same_as_inputs_cast(name, causal):
    mechanism = make(name).float()
    q, k, v, controls = tokens(mechanism, dtype=torch.float32)
    right, _ = mechanism(*(x.bfloat16() for x in (q, k, v)), causal=causal, controls=controls)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = mechanism(q, k, v, causal=causal, controls=controls)
    assert torch.equal(out, right)


@every_name
def test_a_checkpoint_restores_the_same_attention(name):
    torch.manual_seed(1)
    one, other = make(name), make(name)
    if one.traits.random:
        other.redraw(torch.Generator().manual_seed(5))
    causal = not one.traits.full
    q, k, v, controls = tokens(one)
    out, _ = one(q, k, v, causal=causal, controls=controls)
    if one.traits.random:
        assert not torch.allclose(other(q, k, v, causal=causal, controls=controls)[0], out)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(q, k, v, causal=causal, controls=controls)[0], out)


@pytest.mark.parametrize("name", names_where(random=(True,)))
def test_draws_come_from_the_generator_alone(name):
    one, other = make(name), make(name)
    for mechanism in (one, other):
        torch.randn(3)  # torch's own generator has nothing to do with it
        mechanism.redraw(torch.Generator().manual_seed(7))
    causal = not one.traits.full
    q, k, v, controls = tokens(one)
    out, _ = one(q, k, v, causal=causal, controls=controls)
    assert torch.equal(other(q, k, v, causal=causal, controls=controls)[0], out)
    assert torch.equal(one(q, k, v, causal=causal, controls=controls)[0], out)


@every_name
def test_cost_grows_as_the_traits_say(name):
    mechanism = make(name)
    small, large = mechanism.cost(2**20), mechanism.cost(2**21)
    assert small.bytes >= 4 * (2 * HEADS + 2 * mechanism.key_heads) * 2**20 * WIDTH
    growth = large.operations / small.operations
    assert 2 ** GROWTH[mechanism.traits.growth] * 0.97 < growth
    assert growth < 2 ** GROWTH[mechanism.traits.growth] * 1.15
    assert large.bytes / small.bytes <= growth * 1.001


@every_name
def test_every_mechanism_says_what_it_is(name):
    kind = MECHANISMS[name]
    assert kind.__doc__
    assert kind.source
    assert kind.formula
