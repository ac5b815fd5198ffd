"""Masked keys have no effect, whatever stands there, on outputs or gradients."""

import pytest
import torch
from formula import IMPLEMENTATIONS, agree, cosformer, tokens

from cosformer import attention, attention_weights, attention_with_state, linear_attention

LENGTH = 140
MASKS = {
    "left": torch.arange(LENGTH) >= torch.tensor([[3], [131]]),
    "right": torch.arange(LENGTH) < torch.tensor([[100], [1]]),
    "random": torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5,
    "one row all masked": torch.tensor([[True], [False]]).expand(2, LENGTH),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
every_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
both_ways = pytest.mark.parametrize("causal", [True, False])


def poison(x, mask, value):
    return x.masked_fill(~mask[:, None, :, None], value)


@every_mask
@every_impl
@both_ways
def test_masked_keys_count_for_nothing(mask, impl, causal):
    options = {"causal": causal, "key_mask": mask}
    inputs = tokens(2, 2, LENGTH, kv_heads=1, value_width=3)
    agree(
        lambda *x: attention(*x, **options, impl=impl),
        lambda *x: cosformer(*x, **options),
        *inputs,
    )


@every_mask
@every_impl
@both_ways
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_poison_behind_the_mask_changes_no_output_and_no_gradient(mask, impl, causal, value):
    def run(q, k, v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, causal=causal, key_mask=mask, impl=impl)
        return out, *torch.autograd.grad(out.sin().sum(), leaves)

    q, k, v = tokens(2, 2, LENGTH)
    clean = run(q, k, v)
    poisoned = run(q, poison(k, mask, value), poison(v, mask, value))
    for name, before, after in zip(("out", "dq", "dk", "dv"), clean, poisoned, strict=True):
        assert torch.equal(before, after), name
    for grad in poisoned[2:]:
        assert not grad.masked_select(~mask[:, None, :, None]).any()


@every_impl
@pytest.mark.parametrize("name", ["identity", "relu", "leaky_relu", "1+elu", "elu", "silu"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_poison_reaches_no_derivative_of_any_order(name, impl, value):
    mask = MASKS["random"][:, :20]
    options = {"feature_map": name, "rule": "signed", "key_mask": mask, "impl": impl}

    def derivatives(q, k, v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        found = linear_attention(*leaves, causal=True, **options)
        for _ in range(3):
            loss = sum(x.sin().sum() for x in found)
            found = torch.autograd.grad(loss, leaves, create_graph=True)
            yield from found

    q, k, v = tokens(2, 2, 20)
    poisoned = derivatives(q, poison(k, mask, value), poison(v, mask, value))
    clean = derivatives(q, poison(k, mask, 0), poison(v, mask, 0))
    for before, after in zip(clean, poisoned, strict=True):
        torch.testing.assert_close(before, after)


def test_poison_passes_through_no_feature_map_of_the_callers():
    mask = MASKS["random"]
    q, k, v = tokens(2, 2, LENGTH)
    k = poison(k, mask, torch.nan).requires_grad_()
    out = linear_attention(q, k, v, feature_map=torch.exp, key_mask=mask)
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert out.isfinite().all()
    assert not grad.masked_select(~mask[:, None, :, None]).any()


@every_impl
def test_poison_stays_out_of_a_state_and_of_weights(impl):
    mask = MASKS["random"]
    q, k, v = tokens(2, 2, LENGTH)
    bad = q, poison(k, mask, torch.nan), poison(v, mask, torch.inf)
    options = {"horizon": LENGTH, "key_mask": mask}
    clean, poisoned = (attention_with_state(*x, **options, impl=impl) for x in ((q, k, v), bad))
    assert torch.equal(clean[0], poisoned[0])
    assert all(torch.equal(a, b) for a, b in zip(clean[1][:3], poisoned[1][:3], strict=True))
    assert torch.equal(*(attention_weights(q, x, **options) for x in (k, bad[1])))


def test_a_mask_may_be_any_view():
    mask = MASKS["random"]
    q, k, v = tokens(2, 2, LENGTH)
    right = attention(q, k, v, key_mask=mask)
    assert torch.equal(right, attention(q, k, v, key_mask=mask.T.contiguous().T))
    shared = mask[:1].expand(2, -1)
    assert torch.equal(
        attention(q, k, v, key_mask=shared), attention(q, k, v, key_mask=shared.clone())
    )
