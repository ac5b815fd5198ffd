"""CosformerAttention computes the formula, and trains, drops and rounds as it should."""

import copy

import pytest
import torch
from layer_formula import quadratic
from torch import nn

from cosformer.nn import CosformerAttention

SHAPES = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 10, "vdim": 6},
    "one other width, no bias": {"vdim": 6, "bias": False},
    "grouped heads": {"num_kv_heads": 2},
    "one key head, other widths": {"num_kv_heads": 1, "kdim": 10},
    "number as horizon": {"horizon": 31.5},
    "horizon per head": {"horizon": [9.0, 12.0, 20.0, 1e4]},
    "horizon per key head": {"horizon": [9.0, 40.0], "num_kv_heads": 2},
}


def make(*args, seed=0, **options):
    torch.manual_seed(seed)
    layer = CosformerAttention(*args, dtype=torch.float64, **options)
    if layer.in_proj_bias is not None:  # zero as initialised, which would hide a wrong bias
        nn.init.normal_(layer.in_proj_bias, std=0.3)
        nn.init.normal_(layer.out_proj.bias, std=0.3)
    return layer


def inputs(layer, batch=3, queries=7, keys=9):
    widths = (layer.embed_dim, layer.kdim, layer.vdim)
    lengths = (queries, keys, keys)
    return [
        torch.randn(batch, n, width, dtype=torch.float64)
        for n, width in zip(lengths, widths, strict=True)
    ]


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("batch_first", [True, False])
def test_cross_attention_is_the_formula(options, batch_first):
    layer = make(16, 4, batch_first=batch_first, **options)
    query, key, value = inputs(layer)
    expected, weights = quadratic(layer, query, key, value, horizon=layer.horizon)
    if not batch_first:
        query, key, value, expected = (x.transpose(0, 1) for x in (query, key, value, expected))
    out, averaged = layer(query, key, value)
    _, per_head = layer(query, key, value, average_attn_weights=False)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(per_head, weights)
    torch.testing.assert_close(averaged, weights.mean(1))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("batch_first", [True, False])
def test_causal_self_attention_is_the_formula(num_kv_heads, batch_first):
    layer = make(16, 4, batch_first=batch_first, num_kv_heads=num_kv_heads)
    x = torch.randn(2, 150, 16, dtype=torch.float64)
    expected, weights = quadratic(layer, x, x, x, causal=True)
    if not batch_first:
        x, expected = x.transpose(0, 1), expected.transpose(0, 1)
    out, per_head = layer(x, x, x, is_causal=True, average_attn_weights=False)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(per_head, weights)


@pytest.mark.parametrize("same", [{0, 1}, {1, 2}, {0, 2}, {0, 1, 2}, set()])
def test_inputs_that_are_one_tensor_are_projected_by_their_own_weights(same):
    layer = make(16, 4, batch_first=True)
    one = torch.randn(3, 7, 16, dtype=torch.float64)
    query, key, value = (one if n in same else torch.randn_like(one) for n in range(3))
    expected, _ = quadratic(layer, query, key, value)
    torch.testing.assert_close(layer(query, key, value)[0], expected)


def test_unbatched_inputs_are_a_batch_of_one():
    for batch_first in (True, False):
        layer = make(16, 4, kdim=10, batch_first=batch_first)
        query, key, value = inputs(layer, batch=1)
        padding = torch.tensor([False] * 6 + [True] * 3)
        expected, weights = quadratic(layer, query, key, value, key_scale=~padding[None])
        out, averaged = layer(query[0], key[0], value[0], key_padding_mask=padding)
        _, per_head = layer(query[0], key[0], value[0], padding, average_attn_weights=False)
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(averaged, weights[0].mean(0))
        torch.testing.assert_close(per_head, weights[0])


def test_future_tokens_do_not_change_the_past():
    layer = make(16, 4, batch_first=True, horizon=64)
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    changed = torch.cat([x[:, :25], 100 * torch.randn_like(x[:, 25:])], 1)
    one, _ = layer(x, x, x, need_weights=False, is_causal=True)
    other, _ = layer(changed, changed, changed, need_weights=False, is_causal=True)
    torch.testing.assert_close(one[:, :25], other[:, :25])
    assert not torch.allclose(one[:, 25:], other[:, 25:])


def test_weights_come_only_when_asked_for():
    layer = make(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    out, weights = layer(x, x, x, need_weights=False)
    assert weights is None
    torch.testing.assert_close(out, layer(x, x, x)[0])


def test_heads_are_views_of_one_projection():
    for batch_first in (True, False):
        layer = make(16, 4, num_kv_heads=2, batch_first=batch_first)
        x = torch.randn(3, 5, 16, dtype=torch.float64)
        q, k, v = layer.project(x, x, x, batched=True)
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert q.stride(-1) == 1
        assert q.shape == ((3, 4, 5, 4) if batch_first else (5, 4, 3, 4))


def test_gradients_are_those_of_the_formula():
    layer = make(8, 2, batch_first=True, num_kv_heads=1, horizon=20)
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    direction = torch.randn(2, 12, 8, dtype=torch.float64)
    out, _ = layer(x, x, x, need_weights=False, is_causal=True)
    gradients = torch.autograd.grad((out * direction).sum(), list(layer.parameters()))

    def loss(**parameters):
        twin = copy.deepcopy(layer)
        twin.state_dict = lambda: parameters
        expected, _ = quadratic(twin, x, x, x, causal=True, horizon=20)
        return (expected * direction).sum()

    leaves = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    expected = torch.autograd.grad(loss(**leaves), list(leaves.values()))
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_training_learns_to_copy_the_previous_token():
    torch.manual_seed(0)
    layer = CosformerAttention(16, 2, batch_first=True, horizon=8)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(16, 8, 16)
    losses = []
    for _ in range(60):
        out, _ = layer(x, x, x, need_weights=False, is_causal=True)
        loss = (out[:, 1:] - x[:, :-1]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_dropout_acts_in_training_only():
    layer = make(16, 4, dropout=0.5, batch_first=True)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    layer.eval()
    torch.testing.assert_close(layer(x, x, x)[0], quadratic(layer, x, x, x)[0])
    layer.train()
    assert not torch.allclose(layer(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_dropout_drops_whole_keys_and_reports_the_weights_it_used(num_kv_heads):
    layer = make(16, 4, 0.5, batch_first=True, num_kv_heads=num_kv_heads)
    x = torch.randn(8, 20, 16, dtype=torch.float64)
    out, weights = layer(x, x, x, average_attn_weights=False)
    _, whole = quadratic(layer, x, x, x)
    factor = torch.where(whole > 0, weights / whole, torch.nan)
    factor = factor.nanmean(2, keepdim=True).expand_as(whole)  # one draw for all queries
    torch.testing.assert_close(weights, torch.where(whole > 0, whole * factor, 0))
    draws = factor[:, :, 0].nan_to_num()
    assert ((draws.abs() < 1e-9) | ((draws - 2).abs() < 1e-9)).all()
    assert 0.35 < (draws == 0).double().mean() < 0.65
    _, _, v = layer.project(x, x, x, batched=True)
    v = v.repeat_interleave(4 // num_kv_heads, 1)
    torch.testing.assert_close(out, layer.merge_heads(weights @ v, batched=True))


def test_dropout_leaves_the_expectation_alone():
    layer = make(16, 4, 0.3, bias=False)
    x = torch.randn(6, 1, 16, dtype=torch.float64)
    many = x.expand(6, 20000, 16)
    mean = layer(many, many, many, need_weights=False)[0].mean(1)
    layer.eval()
    torch.testing.assert_close(mean, layer(x, x, x)[0][:, 0], atol=0.02, rtol=0)


def test_a_row_without_positive_features_gives_the_bias_and_no_nan():
    layer = make(16, 4, batch_first=True)
    x = torch.zeros(1, 4, 16, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_bias[:16] = -1  # every query feature is relu(-1)
    out, weights = layer(x, x, x)
    torch.testing.assert_close(out, layer.out_proj.bias.expand_as(out))
    assert not weights.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_precision_stays_near_the_formula(dtype):
    layer = make(32, 4, batch_first=True).to(dtype)
    x = torch.randn(2, 50, 32).to(dtype)
    out, weights = layer(x, x, x, is_causal=True)
    assert out.dtype == dtype
    expected, exact = quadratic(layer, x, x, x, causal=True)
    limit = 16 * torch.finfo(dtype).eps
    assert (out.double() - expected).abs().max() < limit * expected.abs().max()
    assert (weights.double() - exact.mean(1)).abs().max() < limit


def test_autocast_is_followed():
    layer = CosformerAttention(16, 4, batch_first=True)
    x = torch.randn(2, 6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(x, x, x, is_causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x, x, x, is_causal=True)[0], atol=0.05, rtol=0.05)


def test_other_weights_and_positions_reach_the_op():
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    memory = torch.randn(1, 5, 16, dtype=torch.float64)
    plain = make(16, 4, batch_first=True)
    for options in ({"weight": "raised_cosine"}, {"positions": "stretch"}):
        other = make(16, 4, batch_first=True, **options)
        assert not torch.allclose(plain(x, memory, memory)[1], other(x, memory, memory)[1])
        weights = other(x, memory, memory, average_attn_weights=False)[1]
        v = other.project(x, memory, memory, batched=True)[2]
        torch.testing.assert_close(
            other(x, memory, memory)[0], other.merge_heads(weights @ v, batched=True)
        )
