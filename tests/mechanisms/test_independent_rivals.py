"""Patterns, hashes and projections against packages written by others; where those err, how."""

import pytest
import torch
from independent import package
from mechanism_cases import F64, draw, make, tokens
from torch.testing import assert_close

HEADS, WIDTH = 2, 6
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}  # a package that computes some of it in float32


def layer_tokens(layer_weights, x, heads=HEADS):
    """q, k, v `[B, H, n, D]` of a layer's projections of x `[B, n, H·D]`."""
    return [(x @ w.mT).unflatten(-1, (heads, -1)).transpose(1, 2) for w in layer_weights]


def merged(out):
    return out.transpose(1, 2).flatten(2)


def unit(linear):
    with torch.no_grad():
        linear.weight.copy_(torch.eye(len(linear.weight)))
        if linear.bias is not None:
            linear.bias.zero_()


def test_linformer_is_that_of_the_package():
    theirs = package("linformer.linformer")
    mechanism = make("linformer", max_length=40, projected=7)
    layer = theirs.LinformerSelfAttention(HEADS * WIDTH, 40, k=7, heads=HEADS).double()
    unit(layer.to_out)
    with torch.no_grad():
        layer.proj_k.copy_(mechanism.key_mix.mT)
        layer.proj_v.copy_(mechanism.value_mix.mT)
    for length in (40, 23):
        x = draw(2, length, HEADS * WIDTH)
        q, k, v = layer_tokens([m.weight for m in (layer.to_q, layer.to_k, layer.to_v)], x)
        assert_close(merged(mechanism(q, k, v)[0]), layer(x))


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_twice_that_of_local_attention(causal):
    """Its exact window of w means w keys on a side and the own one."""
    theirs = package("local_attention.local_attention")
    mechanism = make("local", window=16, impl="blocked")
    layer = theirs.LocalAttention(
        window_size=8, causal=causal, exact_windowsize=True, use_rotary_pos_emb=False
    )
    q, k, v, _ = tokens(mechanism, 48)
    mask = draw(2, 48, seed=4) > -1
    assert_close(mechanism(q, k, v, causal=causal)[0], layer(q, k, v))
    ours, _ = mechanism(q, k, v, causal=causal, key_mask=mask)
    assert_close(ours[:, :, 8:], layer(q, k, v, mask=mask)[:, :, 8:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "rounds"), [(16, 1), (64, 1), (64, 3)])
def test_hashed_attention_is_that_of_reformer_pytorch(causal, length, rounds, monkeypatch):
    """Its rounds lie end to end: the first chunk of one looks back into another round's last."""
    theirs = package("reformer_pytorch.reformer_pytorch")
    mechanism = make("reformer", bucket=8, rounds=rounds)
    layer = theirs.LSHAttention(bucket_size=8, n_hashes=rounds, causal=causal)
    (rotation,) = mechanism.rotations(length)
    x, v = draw(2, HEADS, length, WIDTH), draw(2, HEADS, length, WIDTH, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *_, **__: rotation.movedim(0, 1)[None])
        published = layer(x.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, (2, HEADS))
    out, _ = mechanism(x, x, v, causal=causal)
    first = (mechanism.order(x).argsort(-1) < 8).any(2)  # in the first chunk of some round
    same = ~first if rounds > 1 else torch.ones_like(first)
    assert same.any()
    assert_close(out[same], published[same])
    assert rounds == 1 or not torch.allclose(out, published)


def test_nystromformer_is_that_of_nystrom_attention_for_one_item_and_head():
    """It divides by norms over all items and heads, which couples them."""
    theirs = package("nystrom_attention.nystrom_attention")
    mechanism = make("nystromformer", heads=1)
    sizes = {"dim_head": WIDTH, "heads": 1, "num_landmarks": 8, "residual_conv_kernel": 5}
    layer = theirs.NystromAttention(WIDTH, **sizes).double()
    unit(layer.to_out[0])
    with torch.no_grad():
        layer.res_conv.weight.copy_(mechanism.conv[:, None, :, None])
    x = 4 * draw(1, 40, WIDTH)
    q, k, v = layer_tokens(layer.to_qkv.weight.chunk(3), x, heads=1)
    assert_close(merged(mechanism(q, k, v)[0]), layer(x))


def test_sinkhorn_transformer_hands_keys_on_as_values_and_ours_does_not():
    theirs = package("sinkhorn_transformer.sinkhorn_transformer")
    mechanism = make("sinkhorn")
    layer = theirs.SinkhornAttention(5, HEADS * WIDTH, WIDTH, HEADS, 40)
    q, k, v, _ = tokens(mechanism, 40)
    mixing = mechanism._log_permutation(q, k, causal=False).exp()
    layer.sort_net.forward = lambda q, k, topk: mixing.flatten(0, 1)

    def beside(own, moved):
        own, moved = (x.unflatten(2, (-1, 5)) for x in (own, moved))
        return torch.cat([own, torch.einsum("bhij,bhjpd->bhipd", mixing, moved)], 3)

    scores = q.unflatten(2, (-1, 5)) @ beside(k, k).mT / WIDTH**0.5

    def attend(moved_values):
        return (scores.softmax(-1) @ beside(v, moved_values)).flatten(2, 3)

    published = layer(q, k, v)
    assert_close(published, attend(k))
    assert_close(mechanism(q, k, v)[0], attend(v))
    assert not torch.allclose(published, attend(v))


def transformer_layer(kind, config, *arguments):
    torch.manual_seed(0)
    return kind(config, *arguments).double().train()


def test_longformer_is_that_of_transformers():
    theirs = package("transformers.models.longformer.modeling_longformer")
    width = HEADS * WIDTH
    config = theirs.LongformerConfig(
        hidden_size=width, num_attention_heads=HEADS, attention_window=[8],
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer = transformer_layer(theirs.LongformerSelfAttention, config, 0)
    mechanism = make("longformer", window=8, impl="blocked")
    heads = torch.arange(width).unflatten(0, (HEADS, WIDTH))
    with torch.no_grad():  # the maps of ours after their local projections are their global ones
        for ours, local, other in (
            (mechanism.global_query, layer.query, layer.query_global),
            (mechanism.global_key, layer.key, layer.key_global),
        ):
            other.weight.copy_(
                torch.cat([m @ local.weight[h] for m, h in zip(ours, heads, strict=True)])
            )
            for linear in (local, other):
                linear.bias.zero_()
        layer.value_global.load_state_dict(layer.value.state_dict())
        layer.value.bias.zero_()
        layer.value_global.bias.zero_()
    x = draw(2, 48, width)
    real = torch.arange(48) < torch.tensor([[48], [41]])
    world = torch.arange(48).expand(2, -1) < 2
    mask = torch.zeros(2, 48, dtype=F64).masked_fill(~real, -1e4).masked_fill(world, 1e4)
    (published,) = layer(
        x.clone(), attention_mask=mask, is_index_masked=~real, is_index_global_attn=world,
        is_global_attn=True,
    )  # fmt: skip
    q, k, v = layer_tokens([m.weight for m in (layer.query, layer.key, layer.value)], x)
    out = merged(mechanism(q, k, v, key_mask=real)[0])
    assert_close(out[real], published[real], **FLOAT32)


def test_bigbird_is_that_of_transformers_given_the_same_random_blocks(monkeypatch):
    """It has no random blocks outside of training; ours are the same in both."""
    theirs = package("transformers.models.big_bird.modeling_big_bird")
    config = theirs.BigBirdConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, block_size=4, num_random_blocks=2,
        attention_probs_dropout_prob=0.0, use_bias=False,
    )  # fmt: skip
    layer = transformer_layer(theirs.BigBirdBlockSparseAttention, config, 0)
    mechanism = make("bigbird", block=4, random_blocks=2, impl="blocked")
    x = draw(2, 64, HEADS * WIDTH)
    middle = torch.tensor(mechanism.drawn(64)[1:-1]).numpy()
    for helper in ("_bigbird_block_rand_mask", "_bigbird_block_rand_mask_with_head"):
        monkeypatch.setattr(layer, helper, lambda *_, **__: [middle] * HEADS)
    ones = torch.ones(2, 64)
    blocks, band, rows, columns = theirs.BigBirdModel.create_masks_for_block_sparse_attn(ones, 4)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
    blocked = {"from_blocked_mask": blocks, "to_blocked_mask": blocks}
    published, _ = layer(x, **masks, **blocked)
    q, k, v = layer_tokens([m.weight for m in (layer.query, layer.key, layer.value)], x)
    assert_close(merged(mechanism(q, k, v)[0]), published, **FLOAT32)
