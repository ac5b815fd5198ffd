"""CosformerAttention computes the formula, and trains, drops and rounds as it should."""

import math

import pytest
import torch
from layer_formula import quadratic
from torch import nn
from torch.testing import assert_close

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
    assert_close(out, expected)
    assert_close(per_head, weights)
    assert_close(averaged, weights.mean(1))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("batch_first", [True, False])
def test_causal_self_attention_is_the_formula(num_kv_heads, batch_first):
    layer = make(16, 4, batch_first=batch_first, num_kv_heads=num_kv_heads)
    x = torch.randn(2, 150, 16, dtype=torch.float64)
    expected, weights = quadratic(layer, x, x, x, causal=True)
    if not batch_first:
        x, expected = x.transpose(0, 1), expected.transpose(0, 1)
    out, per_head = layer(x, x, x, is_causal=True, average_attn_weights=False)
    assert_close(out, expected)
    assert_close(per_head, weights)
    out, none = layer(x, x, x, is_causal=True, need_weights=False)
    assert_close(out, expected)
    assert none is None


@pytest.mark.parametrize("same", [{0, 1}, {1, 2}, {0, 2}, {0, 1, 2}, set()])
def test_inputs_that_are_one_tensor_are_projected_by_their_own_weights(same):
    layer = make(16, 4, batch_first=True)
    one = torch.randn(3, 7, 16, dtype=torch.float64)
    query, key, value = (one if n in same else torch.randn_like(one) for n in range(3))
    expected, _ = quadratic(layer, query, key, value)
    assert_close(layer(query, key, value)[0], expected)


def test_unbatched_inputs_are_a_batch_of_one():
    for batch_first in (True, False):
        layer = make(16, 4, kdim=10, batch_first=batch_first)
        query, key, value = inputs(layer, batch=1)
        padding = torch.tensor([False] * 6 + [True] * 3)
        expected, weights = quadratic(layer, query, key, value, key_scale=~padding[None])
        out, averaged = layer(query[0], key[0], value[0], key_padding_mask=padding)
        _, per_head = layer(query[0], key[0], value[0], padding, average_attn_weights=False)
        assert_close(out, expected[0])
        assert_close(averaged, weights[0].mean(0))
        assert_close(per_head, weights[0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_heads_are_views_of_one_projection(batch_first):
    layer, x = make(16, 4, num_kv_heads=2, batch_first=batch_first), torch.randn(3, 5, 16).double()
    heads = layer.project(x, x, x, batched=True)
    assert len({head.untyped_storage().data_ptr() for head in heads}) == 1
    assert heads[0].shape == ((3, 4, 5, 4) if batch_first else (5, 4, 3, 4))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_dropout_drops_whole_keys_and_reports_the_weights_it_used(num_kv_heads):
    layer = make(16, 4, 0.5, batch_first=True, num_kv_heads=num_kv_heads)
    x = torch.randn(8, 20, 16, dtype=torch.float64)
    out, weights = layer(x, x, x, average_attn_weights=False)
    _, whole = quadratic(layer, x, x, x)
    factor = torch.where(whole > 0, weights / whole, torch.nan)
    factor = factor.nanmean(2, keepdim=True).expand_as(whole)  # one draw for all queries
    assert_close(weights, torch.where(whole > 0, whole * factor, 0))
    draws = factor[:, :, 0].nan_to_num()
    assert ((draws.abs() < 1e-9) | ((draws - 2).abs() < 1e-9)).all()
    assert 0.35 < (draws == 0).double().mean() < 0.65
    _, _, v = layer.project(x, x, x, batched=True)
    v = v.repeat_interleave(4 // num_kv_heads, 1)
    assert_close(out, layer.merge_heads(weights @ v, batched=True))
    assert_close(layer.eval()(x, x, x)[0], quadratic(layer, x, x, x)[0])  # in training only


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("horizon", [40.0, math.inf])
@pytest.mark.parametrize(
    ("given", "decay"),
    [
        (0.7, [0.7, 0.7]),
        ([0.7, 1.0], [0.7, 1.0]),
        (torch.tensor([0.5, 0.25]), [0.5, 0.25]),
        ("multiscale", [0.5, 1 - 2**-8.5]),
    ],
)
def test_self_attention_with_a_decay_is_the_formula(given, decay, horizon, causal):
    layer = make(16, 4, batch_first=True, num_kv_heads=2, horizon=horizon, decay=given)
    x = torch.randn(2, 33, 16, dtype=torch.float64)
    padding = torch.arange(33) >= torch.tensor([[33], [20]])
    masks = {"key_padding_mask": padding, "is_causal": causal}
    out, weights = layer(x, x, x, average_attn_weights=False, **masks)
    about = {"causal": causal, "horizon": horizon, "decay": decay, "key_scale": ~padding}
    assert_close((out, weights), quadratic(layer, x, x, x, **about))


def test_cross_attention_refuses_a_decay():
    layer = make(16, 4, batch_first=True, decay="multiscale")
    with pytest.raises(ValueError, match="cross attention has no decay: got 7 queries and 9 keys"):
        layer(*inputs(layer))


def test_other_weights_and_positions_reach_the_op():
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    memory = torch.randn(1, 5, 16, dtype=torch.float64)
    plain = make(16, 4, batch_first=True)
    for options in ({"weight": "raised_cosine"}, {"positions": "stretch"}):
        other = make(16, 4, batch_first=True, **options)
        assert not torch.allclose(plain(x, memory, memory)[1], other(x, memory, memory)[1])
        weights = other(x, memory, memory, average_attn_weights=False)[1]
        v = other.project(x, memory, memory, batched=True)[2]
        assert_close(other(x, memory, memory)[0], other.merge_heads(weights @ v, batched=True))
