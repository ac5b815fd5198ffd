"""Whatever stands behind a mask, NaN as well, reaches no output and no gradient."""

import pytest
import torch
from mechanism_cases import LENGTH, draw, make, names_where, tokens
from torch.testing import assert_close


@pytest.mark.parametrize("name", names_where(mask=(True,)))
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_poison_behind_the_mask_reaches_nothing(name, value):
    mechanism = make(name)
    q, k, v, controls = tokens(mechanism)
    mask = draw(2, LENGTH, seed=9) > -0.8
    results = []
    for poison in (0.0, value):
        hidden = ~mask[:, None, :, None]
        inputs = [x.masked_fill(hidden, poison).requires_grad_() for x in (k, v)]
        shown = {key: x.masked_fill(~mask[:, None], poison) for key, x in controls.items()}
        causal = mechanism.traits.causal == "exact"
        out, _ = mechanism(q, *inputs, key_mask=mask, causal=causal, controls=shown)
        wanted = [*inputs, *mechanism.parameters()]
        grads = torch.autograd.grad(
            out.sin().sum(), wanted, allow_unused=True, materialize_grads=True
        )
        results.append((out, *grads))
        assert not grads[1].masked_select(hidden).any()
    assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("name", names_where(state=("window", "cache", "none")))
@pytest.mark.parametrize("masked", [slice(1, 2), slice(0, 2)])
def test_an_item_without_a_real_token_gets_zeros(name, masked):
    mechanism = make(name)
    inputs = [x.requires_grad_() for x in tokens(mechanism)[:3]]
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[masked] = False
    out, _ = mechanism(*inputs, key_mask=mask)
    assert not out[masked].any()
    grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True, materialize_grads=True)
    for grad in grads:
        assert grad.isfinite().all()
        assert not grad[masked].any()


@pytest.mark.parametrize("name", ["longformer", "sparse", "bigbird", "transnormer-local"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_token_that_is_absent_may_be_poison_as_a_query_too(name, impl):
    options = {} if name == "transnormer-local" else {"impl": impl}
    mechanism = make(name, **options)
    inputs = [x.requires_grad_() for x in tokens(mechanism)[:3]]
    mask = draw(2, LENGTH, seed=9) > -0.8
    results = []
    for poison in (0.0, torch.nan):
        hidden = (x.masked_fill(~mask[:, None, :, None], poison) for x in inputs)
        out, _ = mechanism(*hidden, key_mask=mask)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    assert_close(*results, rtol=0, atol=0)
