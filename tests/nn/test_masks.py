"""The masks of nn.MultiheadAttention: honoured with their meaning, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_formula import quadratic
from torch import nn
from torch.testing import assert_close

from cosformer.nn import CosformerAttention

LENGTH = 6
CAUSAL = {
    "float": nn.Transformer.generate_square_subsequent_mask(LENGTH),
    "float64": nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64),
    "bool": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1),
    "one per head, float": nn.Transformer.generate_square_subsequent_mask(LENGTH).expand(8, -1, -1),
    "one per head, bool": torch.ones(8, LENGTH, LENGTH, dtype=torch.bool).triu(1),
}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return CosformerAttention(16, 4, batch_first=True, dtype=torch.float64)


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, LENGTH, 16, dtype=torch.float64)


def padded(x, side, form):
    """The sequences of x padded with three NaN, and the mask that says so."""
    filler = torch.full((2, 3, 16), torch.nan, dtype=x.dtype)
    parts, mask = [x, filler], torch.arange(LENGTH + 3) >= LENGTH
    if side == "left":
        parts, mask = parts[::-1], mask.flip(0)
    if form == "float":
        mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask, -torch.inf)
    return torch.cat(parts, 1), mask.expand(2, -1)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_ignored_whatever_it_holds(side, causal, form, x):
    layer = CosformerAttention(16, 4, batch_first=True, horizon=32, dtype=torch.float64)
    expected, expected_weights = layer(x, x, x, is_causal=causal)
    longer, mask = padded(x, side, form)
    out, weights = layer(longer, longer, longer, key_padding_mask=mask, is_causal=causal)
    real = slice(0, LENGTH) if side == "right" else slice(3, 9)
    assert_close(out[:, real], expected)
    assert_close(weights[:, real, real], expected_weights)


@pytest.mark.parametrize("form", ["bool", "float"])
def test_padding_sends_no_gradient_and_spoils_none(form, layer, x):
    memory, mask = padded(x, "right", form)
    memory.requires_grad_()
    layer(x.requires_grad_(), memory, memory, mask, need_weights=False)[0].sin().sum().backward()
    assert x.grad.isfinite().all()
    assert memory.grad[:, :LENGTH].isfinite().all()
    assert memory.grad[:, :LENGTH].any()


def test_a_float_padding_mask_multiplies_weights_by_its_exponential(layer, x):
    mask = torch.randn(2, LENGTH, dtype=torch.float64)
    mask[0, 2] = -torch.inf
    expected, weights = quadratic(layer, x, x, x, key_scale=mask.exp())
    out, averaged = layer(x, x, x, mask)
    assert_close(out, expected)
    assert_close(averaged, weights.mean(1))


def test_a_sequence_of_padding_alone_gives_the_bias_and_no_nan(layer, x):
    nn.init.normal_(layer.out_proj.bias)
    out, _ = layer(x, x, x, torch.tensor([[True], [False]]).expand(-1, LENGTH))
    assert_close(out[0], layer.out_proj.bias.expand_as(out[0]))
    assert out.isfinite().all()


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL.keys())
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_causal_mask_makes_attention_causal(mask, is_causal, layer, x):
    expected, weights = quadratic(layer, x, x, x, causal=True)
    out, averaged = layer(x, x, x, attn_mask=mask, is_causal=is_causal)
    assert_close(out, expected)
    assert_close(averaged, weights.mean(1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_blocks_nothing_changes_nothing(dtype, layer, x):
    for memory in (x, torch.cat([x, x], 1)):
        mask = torch.zeros(LENGTH, memory.shape[1], dtype=dtype)
        out, _ = layer(x, memory, memory, attn_mask=mask)
        assert_close(out, quadratic(layer, x, memory, memory)[0])


def test_a_causal_mask_of_one_token_is_accepted_with_its_hint(layer, x):
    one = x[:, :1]
    for dtype in (torch.float32, torch.bool):
        hinted = layer(one, one, one, attn_mask=torch.zeros(1, 1, dtype=dtype), is_causal=True)
        assert_close(hinted, layer(one, one, one))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CAUSAL)),
    entry=st.tuples(st.integers(0, 7), st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1)),
    is_causal=st.booleans(),
    need_weights=st.booleans(),
)
def test_a_mask_that_differs_in_one_entry_is_refused(name, entry, is_causal, need_weights):
    layer = CosformerAttention(16, 4, batch_first=True)
    x = torch.randn(2, LENGTH, 16)
    mask = CAUSAL[name].clone()
    entry = entry[-mask.dim() :]
    mask[entry] = ~mask[entry] if mask.dtype == torch.bool else -1.0
    with pytest.raises(ValueError, match="attn_mask must block exactly the future"):
        layer(x, x, x, attn_mask=mask, is_causal=is_causal, need_weights=need_weights)


REFUSED = [
    ({"attn_mask": [[False] * 6] * 6}, "attn_mask must be a tensor, got list"),
    ({"key_padding_mask": [[False] * 6] * 2}, "key_padding_mask must be a tensor, got list"),
    ({"attn_mask": torch.randn(6, 6)}, r"torch.float32 mask of shape \(6, 6\).*key_padding_mask"),
    ({"attn_mask": torch.zeros(6, 6), "is_causal": True}, "is_causal=True"),
    ({"attn_mask": torch.zeros(6, 5)}, r"attn_mask must have shape \(6, 6\) or \(8, 6, 6\), got"),
    ({"attn_mask": torch.zeros(6, 6, dtype=torch.int64)}, "attn_mask must be of a bool or float"),
    ({"key_padding_mask": torch.zeros(2, 5)}, r"key_padding_mask must have shape \(2, 6\)"),
    ({"key_padding_mask": torch.zeros(2, 6, dtype=torch.int64)}, "key_padding_mask must be of a b"),
    ({"key_padding_mask": torch.full((2, 6), torch.inf)}, "key_padding_mask must be -inf.*got inf"),
    ({"key_padding_mask": torch.full((2, 6), torch.nan)}, "key_padding_mask must be -inf.*got nan"),
    ({"key_padding_mask": torch.full((2, 6), 800.0)}, "key_padding_mask must be -inf.*got 800"),
    ({"attn_mask": torch.full((6, 6), -1e9).triu(1)}, "Write -inf where"),
    ({"attn_mask": torch.zeros(6, 6, device="meta")}, "attn_mask must hold values.*got a meta"),
    (
        {"key_padding_mask": torch.zeros(2, 6, dtype=torch.bool, device="meta")},
        "key_padding_mask must be on the device of the inputs, cpu, got meta",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_masks_say_what_to_do(options, message, layer, x):
    with pytest.raises((ValueError, TypeError), match=message):
        layer(x, x, x, **options)


def test_on_meta_a_mask_is_trusted_with_its_hint():
    layer = CosformerAttention(16, 4, batch_first=True, device="meta")
    x = torch.empty(2, LENGTH, 16, device="meta")
    mask = torch.empty(LENGTH, LENGTH, device="meta")
    assert layer(x, x, x, attn_mask=mask, is_causal=True)[0].shape == x.shape


def test_causal_cross_attention_of_unequal_lengths_is_refused(layer, x):
    with pytest.raises(ValueError, match=r"as many queries as keys, got 5 and 6.*query_start"):
        layer(x[:, :5], x, x, is_causal=True)
    rectangular = torch.ones(5, 6, dtype=torch.bool).triu(1)
    with pytest.raises(ValueError, match="attn_mask must block exactly the future"):
        layer(x[:, :5], x, x, attn_mask=rectangular)
