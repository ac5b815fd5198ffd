"""A block: attention, cross attention and feed-forward, each added to what came before."""

import pytest
import torch
from layer_formula import draw
from streaming import in_pieces
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.nn import AttentionLayer, Block, FeedForward


def make(*, cross=False, glu=False, mechanism="softmax", **arguments):
    torch.manual_seed(0)
    options = {"horizon": 64} if mechanism == "cosformer" else {}
    layers = [AttentionLayer(16, 4, mechanism=mechanism, options=options) for _ in range(2)]
    forward = FeedForward(16, 24, glu=glu)
    block = Block(layers[0], forward, layers[1] if cross else None, **arguments).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return block


def test_a_block_adds_its_parts_in_turn():
    block, x, context = make(cross=True), draw(2, 9, 16), draw(2, 7, 16, seed=2)
    mask = draw(2, 7, seed=3) > -1
    out = block(x, context, causal=True, context_mask=mask)
    x = x + block.attention(block.attention_norm(x), causal=True)
    x = x + block.cross(block.cross_norm(x), context, key_mask=mask)
    assert_close(out, x + block.feed_forward(block.feed_forward_norm(x)))


def test_the_feed_forward_is_its_formula():
    x = draw(2, 9, 16)
    for glu in (False, True):
        part = make(glu=glu).feed_forward
        inner = F.silu(part.gate(x)) * part.up(x) if glu else F.gelu(part.up(x))
        assert_close(part(x), part.down(inner))


@pytest.mark.parametrize("mechanism", ["cosformer", "softmax", "rope-linear", "spe"])
@torch.no_grad()
def test_a_stream_with_a_context_is_the_full_pass(mechanism):
    block, x, context = make(cross=True, mechanism=mechanism), draw(2, 9, 16), draw(2, 7, 16)
    mask = draw(2, 7, seed=3) > -1
    start = block.empty_state(2)
    out, _ = in_pieces(block, x, [4, 1, 2, 1, 1], start, context, context_mask=mask)
    assert_close(out, block(x, context, causal=True, context_mask=mask))


def test_dropout_is_for_training_and_of_the_added_parts():
    block, x = make(dropout=0.5), draw(2, 9, 16)
    assert_close(block(x), block(x))
    block.train()
    assert not torch.allclose(block(x), block(x))
    mean = torch.stack([block(x) for _ in range(400)]).mean(0)
    assert (mean - block.eval()(x)).abs().mean() < 0.2


def test_bad_arguments_are_named():
    x, mask = draw(1, 3, 16), torch.ones(1, 3, dtype=torch.bool)
    forward = FeedForward(16, 24)
    for call, message in (
        (lambda: make()(x, x), "context must be None for a block without cross"),
        (lambda: make(cross=True)(x), "context must be given to a block with cross"),
        (lambda: make()(x, context_mask=mask), "context_mask must be None without a context"),
        (lambda: make(dropout=2), r"dropout must lie in 0 \.\.\. 1, got 2"),
        (lambda: make().attention(x, start=2), "start must be 0 unless x looks at a whole context"),
        (lambda: FeedForward(4, 0), "hidden must be a whole number from 1 on, got 0"),
        (
            lambda: Block(AttentionLayer(16, 4), forward, AttentionLayer(8, 4)),
            "cross must have embed_dim=16, as attention, got 8",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="glu must be a bool, got int"):
        FeedForward(4, 4, glu=1)
    with pytest.raises(TypeError, match="attention must be an AttentionLayer, got FeedForward"):
        Block(forward, forward)


def test_a_step_takes_one_token_of_the_streams_that_the_state_is_of():
    block, x = make(mechanism="cosformer"), draw(2, 2, 16)
    for tokens, batch, message in (
        (x, 2, r"x must be one token \[batch, 1, 16\] in step, got \[2, 2, 16\]"),
        (x[:, :1], 3, r"state must hold .* = \[2, 4, 2, 4, 4\], got \[3, 4, 2, 4, 4\]"),
        (x[:, :1], 2, "step records no gradients"),
    ):
        with pytest.raises(ValueError, match=message):
            block.step(tokens, block.empty_state(batch))
    with pytest.raises(TypeError, match="state must be a LayerState, got NoneType"):
        block.step(x[:, :1], None)
