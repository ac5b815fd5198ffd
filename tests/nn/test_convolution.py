"""The short convolution of a layer: what it sees, what it remembers, what padding does to it."""

import pytest
import torch
from layer_formula import F64, draw
from streaming import in_pieces
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from cosformer.nn import AttentionLayer, LayerState
from cosformer.nn.convolution import ShortConvolution

DECAY = {"decay": "multiscale", "horizon": 64}


def make(mechanism="cosformer", **arguments):
    torch.manual_seed(0)
    options = DECAY if mechanism == "cosformer" else {}
    given = {"options": options, "conv": 4, "dtype": F64, **arguments}
    return AttentionLayer(16, 4, mechanism=mechanism, **given).eval()


@pytest.mark.parametrize(("width", "causal"), [(4, True), (1, True), (5, False), (5, True)])
def test_it_is_pytorchs_depthwise_convolution_and_begins_like_it(width, causal):
    torch.manual_seed(0)
    ours = ShortConvolution(6, width, dtype=F64)
    torch.manual_seed(0)
    theirs = nn.Conv1d(6, 6, width, groups=6, dtype=F64)
    x, left = draw(2, 9, 6), width - 1 if causal else width // 2
    right = theirs(F.pad(x.mT, (left, width - 1 - left))).mT
    assert_close(ours(x, causal=causal)[0], right)


def test_its_derivatives_are_right():
    layer, x = ShortConvolution(3, 4, dtype=F64), draw(2, 5, 3).requires_grad_()
    mask = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    before = draw(2, 3, 3, seed=2).requires_grad_()

    def run(x, before, weight):
        given = {"causal": True, "key_mask": mask, "before": before}
        return torch.func.functional_call(layer, {"weight": weight}, (x,), given)  # and the state

    assert torch.autograd.gradcheck(run, (x, before, layer.weight))


def test_on_the_input_it_stands_before_all_projections():
    layer, x = make("gated-delta", gate=True, conv_on="input"), draw(2, 9, 16)
    plain = make("gated-delta", gate=True, conv=0)
    weights = {name: w for name, w in layer.state_dict().items() if not name.startswith("conv")}
    plain.load_state_dict(weights)
    assert_close(layer(x, causal=True), plain(layer.conv(x, causal=True)[0], causal=True))


def test_on_qkv_it_stands_after_their_projections():
    layer, x = make(num_kv_heads=2, positions="rotary"), draw(2, 9, 16)
    q, k, v = layer.project(x, x, x, batched=True)
    flat = torch.cat([each.transpose(1, 2).flatten(2) for each in (q, k, v)], -1)
    q, k, v = layer.conv(flat, causal=True)[0].split([16, 8, 8], -1)
    q, k, v = (each.unflatten(2, (-1, 4)).transpose(1, 2) for each in (q, k, v))
    q, k = layer.positions.encode(q, k, 0, 0)
    heads, _ = layer.mechanism(q, k, v, causal=True)
    assert_close(layer(x, causal=True), layer.merge_heads(heads, batched=True))


@pytest.mark.parametrize("on", ["input", "qkv"])
@pytest.mark.parametrize("mechanism", ["cosformer", "softmax", "local", "gated-delta"])
@torch.no_grad()
def test_pieces_and_steps_of_a_stream_are_the_full_pass(mechanism, on):
    layer = make(mechanism, conv_on=on, num_kv_heads=2, gate="sigmoid", qk_norm=True)
    x = draw(2, 20, 16)
    out, state = in_pieces(layer, x, [1, 2, 1, 1, 13, 1, 1], layer.empty_state(2))
    assert_close(out, layer(x, causal=True))
    assert state.conv.shape == (2, 3, 16 if on == "input" else 32)
    assert layer.stream(x)[1].conv.untyped_storage().nbytes() == state.conv.nbytes  # not the prompt


@pytest.mark.parametrize("on", ["input", "qkv"])
def test_gradients_go_through_a_split_stream(on):
    layer, x = make(conv_on=on), draw(2, 9, 16)
    whole = torch.autograd.grad(layer(x, causal=True).square().sum(), layer.parameters())
    loss = in_pieces(layer, x, [5, 4], layer.empty_state(2))[0].square().sum()
    assert_close(torch.autograd.grad(loss, layer.parameters()), whole)


@pytest.mark.parametrize("on", ["input", "qkv"])
@pytest.mark.parametrize(("causal", "width"), [(True, 4), (False, 5)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_leak_through_it(on, causal, width, side):
    layer, x = make("softmax", conv_on=on, conv=width), draw(2, 9, 16)
    real = slice(3, None) if side == "left" else slice(None, 6)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, real] = True
    out = layer(x, causal=causal, key_mask=mask)
    assert_close(out[:, real], layer(x[:, real], causal=causal))
    poisoned = torch.where(mask[..., None], x, torch.nan)
    assert_close(layer(poisoned, causal=causal, key_mask=mask)[:, real], out[:, real])


@pytest.mark.parametrize("on", ["input", "qkv"])
@torch.no_grad()
def test_a_prompt_padded_on_the_left_is_gone_on_from(on):
    layer, x = make(conv_on=on), draw(2, 10, 16)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :7] = False  # fewer real tokens than the convolution sees
    _, state = layer.stream(x[:, :9], key_mask=real)
    for call in (layer.stream, layer.step):
        assert_close(call(x[:, 9:], state)[0][1:], layer(x[1:, 7:], causal=True)[:, -1:])


def test_every_parameter_of_it_learns_also_under_autocast():
    for on in ("input", "qkv"):
        layer = make(conv_on=on, qk_norm=True, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(draw(2, 9, 16).float(), causal=True).float().square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name


@pytest.mark.parametrize("on", ["input", "qkv"])
@pytest.mark.parametrize("mechanism", ["cosformer", "softmax"])
@torch.no_grad()
def test_steps_and_streams_agree_under_autocast(mechanism, on):
    layer = make(mechanism, conv_on=on, qk_norm=True, dtype=torch.float32)
    x = draw(2, 9, 16).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = layer.stream(x[:, :8])
        streamed, _ = layer.stream(x[:, 8:], state)
        stepped, _ = layer.step(x[:, 8:], state)
    assert_close(stepped, streamed, rtol=0.02, atol=0.01)
    assert stepped.dtype == torch.bfloat16


def test_what_cannot_be_is_named():
    layer, x = make(), draw(2, 5, 16)
    for call, error, message in (
        (lambda: layer(x), ValueError, "conv must be odd without causal=True, .* got 4: make it 5"),
        (
            lambda: make("softmax")(x, draw(2, 5, 16)),
            ValueError,
            "context must be None in .* conv=4",
        ),
        (lambda: make("softmax", context_dim=8), ValueError, "conv must be 0 where context_dim"),
        (lambda: make(conv=-1), ValueError, "conv must be a whole number from 0 on, got -1"),
        (lambda: make(conv=True), TypeError, "conv must be a whole number from 0 on, got True"),
        (lambda: make(conv_on="v"), ValueError, "conv_on must be one of input, qkv, got 'v'"),
        (lambda: make(conv=0, conv_on="input"), ValueError, "conv_on must be left as 'qkv' with"),
        (
            lambda: layer(x, causal=True, key_mask=torch.ones(2, 4, dtype=torch.bool)),
            ValueError,
            r"key_mask must be \[batch, keys\] = \[2, 5\], got \[2, 4\]",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    _, state = layer.stream(x)
    plain = make(conv=0)
    for taker, given, message in (
        (layer, LayerState(state.mechanism, 5), "state.conv must be a tensor, got NoneType"),
        (layer, state._replace(conv=state.conv[:, 1:]), r"state.conv must be \[2, 3, 48\], the"),
        (plain, state, "state.conv must be None for a layer without a convolution"),
    ):
        with torch.no_grad(), pytest.raises((ValueError, TypeError), match=message):
            taker.step(x[:, :1], given)
        with pytest.raises((ValueError, TypeError), match=message):
            taker.stream(x, given)
