"""Streaming in any cut gives what one causal pass gives, from a state of constant size."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cosformer.nn import CosformerAttention

OPTIONS = {
    "plain": {"horizon": 64},
    "sequence first": {"horizon": 64, "batch_first": False},
    "grouped heads": {"horizon": 64, "num_kv_heads": 2},
    "horizon per key head": {"horizon": [40.0, 90.0], "num_kv_heads": 2},
    "raised cosine": {"horizon": 10, "weight": "raised_cosine"},
}


def make(**options):
    torch.manual_seed(0)
    layer = CosformerAttention(16, 4, **{"batch_first": True, **options}, dtype=torch.float64)
    nn.init.normal_(layer.in_proj_bias, std=0.3)
    return layer.eval()


def stream(length=30):
    torch.manual_seed(1)
    return torch.randn(2, length, 16, dtype=torch.float64)


def lay(layer, x):
    """Batch-first x in the layout of the layer, and back."""
    return x if layer.batch_first else x.transpose(0, 1)


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(OPTIONS)), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_stretches_in_any_cut_equal_the_full_pass(name, cuts):
    layer, x = make(**OPTIONS[name]), stream()
    expected = lay(layer, layer(*3 * [lay(layer, x)], need_weights=False, is_causal=True)[0])
    edges = [0, *sorted(cuts), 30]
    state, pieces = None, []
    for start, stop in pairwise(edges):
        out, state = layer.forward_with_state(lay(layer, x[:, start:stop]), state)
        pieces.append(lay(layer, out))
    torch.testing.assert_close(torch.cat(pieces, 1), expected)
    assert int(state.position) == 30


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@torch.no_grad()
def test_steps_after_a_prompt_equal_the_full_pass(options):
    layer, x = make(**options), stream()
    expected = lay(layer, layer(*3 * [lay(layer, x)], need_weights=False, is_causal=True)[0])
    out, state = layer.forward_with_state(lay(layer, x[:, :11]))
    pieces = [lay(layer, out)]
    for t in range(11, 30):
        pieces.append(lay(layer, layer.step(lay(layer, x[:, t : t + 1]), state)))
    torch.testing.assert_close(torch.cat(pieces, 1), expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@torch.no_grad()
def test_steps_from_an_empty_state_equal_the_full_pass(options):
    layer, x = make(**options), stream(8)
    expected = lay(layer, layer(*3 * [lay(layer, x)], need_weights=False, is_causal=True)[0])
    state = layer.empty_state(2)
    sizes = [part.shape for part in state[:3]]
    pieces = [lay(layer, layer.step(lay(layer, x[:, t : t + 1]), state)) for t in range(8)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected)
    assert [part.shape for part in state[:3]] == sizes
    assert state.key_value.shape[1] == layer.num_kv_heads


@torch.no_grad()
def test_a_left_padded_prompt_decodes_as_if_unpadded():
    layer, x = make(horizon=64), stream(12)
    prompt = torch.cat([torch.full((2, 5, 16), torch.nan, dtype=x.dtype), x[:, :10]], 1)
    padding = (torch.arange(15) < 5).expand(2, -1)
    expected, _ = layer(x, x, x, need_weights=False, is_causal=True)
    for mask in (padding, torch.zeros(2, 15).masked_fill(padding, -torch.inf)):
        out, state = layer.forward_with_state(prompt, key_padding_mask=mask)
        torch.testing.assert_close(out[:, 5:], expected[:, :10])
        for t in (10, 11):
            token = layer.step(x[:, t : t + 1], state)
            torch.testing.assert_close(token, expected[:, t : t + 1])


def test_a_stretch_leaves_the_given_state_as_it_was():
    layer, x = make(horizon=64), stream()
    _, state = layer.forward_with_state(x[:, :10])
    before = [part.clone() for part in state[:3]]
    layer.forward_with_state(x[:, 10:], state)
    assert all(torch.equal(a, b) for a, b in zip(before, state[:3], strict=True))


def test_gradients_flow_through_a_state():
    layer, x = make(horizon=64), stream()
    first, state = layer.forward_with_state(x[:, :10])
    second, _ = layer.forward_with_state(x[:, 10:], state)
    torch.cat([first, second], 1).square().sum().backward()
    streamed = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x, x, x, need_weights=False, is_causal=True)[0].square().sum().backward()
    torch.testing.assert_close(streamed, [p.grad for p in layer.parameters()])


@torch.no_grad()
def test_states_are_never_below_float32():
    assert make(horizon=64).empty_state(2).key_value.dtype == torch.float64
    layer = make(horizon=64).to(torch.bfloat16)
    state = layer.empty_state(2)
    assert state.key_value.dtype == torch.float32
    x = stream(6).to(torch.bfloat16)
    steps = torch.cat([layer.step(x[:, t : t + 1], state) for t in range(6)], 1)
    out, _ = layer(x, x, x, need_weights=False, is_causal=True)
    torch.testing.assert_close(steps, out, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_dropout_acts_in_streams_while_training():
    layer, x = make(horizon=64, dropout=0.5), stream(6)
    expected, _ = layer.forward_with_state(x)
    layer.train()
    assert not torch.allclose(layer.forward_with_state(x)[0], expected)
    state = layer.empty_state(2)
    values = torch.cat([layer.step(x[:, t : t + 1], state) for t in range(6)], 1)
    assert not torch.allclose(values, expected)


REFUSED = [
    ({"horizon": None}, "horizon must be a number for streaming, got None"),
    ({"horizon": 64, "positions": "stretch"}, "positions must be 'index' for streaming"),
    ({"horizon": 64, "kdim": 8}, "kdim and vdim must equal embed_dim for streaming"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_layers_that_cannot_stream_say_why(options, message):
    torch.manual_seed(0)
    layer, x = CosformerAttention(16, 4, batch_first=True, **options), torch.randn(2, 1, 16)
    state = CosformerAttention(16, 4, horizon=64).empty_state(2)
    for call in (
        lambda: layer.empty_state(2),
        lambda: layer.forward_with_state(x),
        lambda: layer.step(x, state),
    ):
        with pytest.raises(ValueError, match=message):
            call()


WRONG = [
    (lambda layer, x, state: layer.step(x, None), TypeError, "state must be a State, got NoneTy"),
    (
        lambda layer, x, state: layer.step(x, tuple(state)),
        TypeError,
        "state must be a State, got t",
    ),
    (
        lambda layer, x, state: layer.step(None, state),
        TypeError,
        "x must be a tensor, got NoneType",
    ),
    (lambda layer, x, state: layer.step(x[..., :8], state), ValueError, "x must have .*16, got"),
    (
        lambda layer, x, state: layer.forward_with_state(None),
        TypeError,
        "x must be a tensor, got NoneType",
    ),
    (
        lambda layer, x, state: layer.forward_with_state(x, tuple(state)),
        TypeError,
        "state must be a State, got tuple",
    ),
    (
        lambda layer, x, state: layer.forward_with_state(x[..., :8]),
        ValueError,
        r"x must have .* width 16, got shape \(2, 1, 8\)",
    ),
    (
        lambda layer, x, state: layer.forward_with_state(
            torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
        ),
        ValueError,
        "x must not be a nested tensor",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
@torch.no_grad()
def test_a_stream_names_what_is_wrong_with_its_arguments(call, error, message):
    layer = make(horizon=8)
    with pytest.raises(error, match=message):
        call(layer, stream(1), layer.empty_state(2))


@torch.no_grad()
def test_streaming_errors_name_the_value():
    layer, x = make(horizon=8), stream()
    state = layer.empty_state(2)
    with pytest.raises(ValueError, match="x must hold one token in step, got 3"):
        layer.step(x[:, :3], state)
    with pytest.raises(ValueError, match="x must have a batch dimension"):
        layer.step(x[0, :1], state)
    with pytest.raises(ValueError, match="horizon"):
        layer.forward_with_state(x)  # 30 tokens, horizon 8
    with pytest.raises(ValueError, match=r"state must have the horizon 8.*got 64"):
        layer.step(x[:, :1], make(horizon=64).empty_state(2))
    with pytest.raises(ValueError, match=r"horizon must be the state's 64.*got 8"):
        layer.forward_with_state(x[:, :2], make(horizon=64).empty_state(2))
    with pytest.raises(ValueError, match="state must have the weight 'cosine'"):
        layer.step(x[:, :1], make(horizon=8, weight="raised_cosine").empty_state(2))
    with torch.enable_grad(), pytest.raises(ValueError, match="step records no gradients"):
        layer.step(x[:, :1], state)


def test_a_step_goes_by_the_implementation_of_the_layer():
    layer = CosformerAttention(16, 4, batch_first=True, horizon=8, impl="triton").double()
    with torch.no_grad(), pytest.raises(ValueError, match="impl='triton' needs"):
        layer.step(torch.randn(1, 1, 16).double(), layer.empty_state(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_does_not_share_the_horizon_it_was_given(dtype):
    horizon = torch.tensor([40.0, 90.0], dtype=dtype)
    layer, x = make(horizon=horizon, num_kv_heads=2), stream()
    before, state = layer.forward_with_state(x)
    horizon.fill_(31.0)
    assert layer.horizon.tolist() == state.horizon.tolist() == [40.0, 90.0]
    assert torch.equal(layer.forward_with_state(x)[0], before)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
def test_a_compiled_stream_knows_a_state_of_another_horizon():
    layers = [make(horizon=horizons, num_kv_heads=2) for horizons in ([40.0, 90.0], [40.0, 91.0])]
    torch._dynamo.reset()
    fast = torch.compile(layers[0].forward_with_state, fullgraph=True, backend="eager")
    x = stream()
    state, other = (layer.forward_with_state(x[:, :20])[1] for layer in layers)
    torch.testing.assert_close(
        fast(x[:, 20:], state), layers[0].forward_with_state(x[:, 20:], state)
    )
    with pytest.raises(RuntimeError, match="horizon must be the state's"):
        fast(x[:, 20:], other)
