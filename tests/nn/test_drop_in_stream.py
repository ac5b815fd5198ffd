"""A stream in any pieces gives what one causal pass gives, from a state of constant size."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from cosformer.nn import CosformerAttention

OPTIONS = {
    "plain": {"horizon": 64},
    "sequence first": {"horizon": 64, "batch_first": False},
    "grouped heads": {"horizon": 64, "num_kv_heads": 2},
    "horizon per key head": {"horizon": [40.0, 90.0], "num_kv_heads": 2},
    "raised cosine": {"horizon": 10, "weight": "raised_cosine"},
    "decay": {"horizon": 64, "decay": 0.9, "batch_first": False},
    "decay per key head": {"horizon": 64, "decay": "multiscale", "num_kv_heads": 2},
    "decay without a cosine": {"horizon": math.inf, "decay": "multiscale"},
}


def make(**options):
    torch.manual_seed(0)
    layer = CosformerAttention(16, 4, **{"batch_first": True, **options}, dtype=torch.float64)
    nn.init.normal_(layer.in_proj_bias, std=0.3)
    return layer.eval()


def draw(length=30):
    torch.manual_seed(1)
    return torch.randn(2, length, 16, dtype=torch.float64)


def lay(layer, x):
    """Batch-first x in the layout of the layer, and back."""
    return x if layer.batch_first else x.transpose(0, 1)


def whole(layer, x):
    return lay(layer, layer(*3 * [lay(layer, x)], need_weights=False, is_causal=True)[0])


def step_by_step(layer, x, state):
    tokens = (lay(layer, token) for token in x.split(1, 1))
    return torch.cat([lay(layer, layer.step(token, state)) for token in tokens], 1)


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(OPTIONS)), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_a_stream_in_any_pieces_equals_the_full_pass(name, cuts):
    layer, x = make(**OPTIONS[name]), draw()
    state, pieces = None, []
    for start, stop in pairwise([0, *sorted(cuts), 30]):
        layer.stream(lay(layer, x[:, start:stop]), state)  # which leaves the state as it was
        out, state = layer.stream(lay(layer, x[:, start:stop]), state)
        pieces.append(lay(layer, out))
    assert_close(torch.cat(pieces, 1), whole(layer, x))
    assert int(state.position) == 30


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@torch.no_grad()
def test_steps_equal_the_full_pass_after_a_prompt_and_from_an_empty_state(options):
    layer, x = make(**options), draw()
    _, state = layer.stream(lay(layer, x[:, :11]))
    assert_close(step_by_step(layer, x[:, 11:], state), whole(layer, x)[:, 11:])
    state = layer.empty_state(2)
    sizes = [part.shape for part in state[:3]]
    assert_close(step_by_step(layer, x[:, :8], state), whole(layer, x[:, :8]))
    assert [part.shape for part in state[:3]] == sizes
    assert state.key_value.shape[1] == layer.num_kv_heads


@torch.no_grad()
def test_a_left_padded_prompt_decodes_as_if_unpadded():
    layer, x = make(horizon=64), draw(12)
    prompt = torch.cat([torch.full((2, 5, 16), torch.nan, dtype=x.dtype), x[:, :10]], 1)
    padding = (torch.arange(15) < 5).expand(2, -1)
    expected = whole(layer, x)
    for mask in (padding, torch.zeros(2, 15).masked_fill(padding, -torch.inf)):
        out, state = layer.stream(prompt, key_padding_mask=mask)
        assert_close(out[:, 5:], expected[:, :10])
        assert_close(step_by_step(layer, x[:, 10:], state), expected[:, 10:])


def test_gradients_flow_through_a_state():
    layer, x = make(horizon=64), draw()
    first, state = layer.forward_with_state(x[:, :10])  # another name of stream
    second, _ = layer.stream(x[:, 10:], state)
    torch.cat([first, second], 1).square().sum().backward()
    streamed = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    whole(layer, x).square().sum().backward()
    assert_close(streamed, [p.grad for p in layer.parameters()])


@torch.no_grad()
def test_states_are_never_below_float32():
    assert make(horizon=64).empty_state(2).key_value.dtype == torch.float64
    layer, x = make(horizon=64).to(torch.bfloat16), draw(6).to(torch.bfloat16)
    state = layer.empty_state(2)
    assert state.key_value.dtype == torch.float32
    assert_close(step_by_step(layer, x, state), whole(layer, x), atol=0.02, rtol=0.02)


@torch.no_grad()
def test_dropout_acts_in_streams_while_training():
    layer, x = make(horizon=64, dropout=0.5), draw(6)
    expected, _ = layer.stream(x)
    layer.train()
    assert not torch.allclose(layer.stream(x)[0], expected)
    assert not torch.allclose(step_by_step(layer, x, layer.empty_state(2)), expected)


REFUSED = [
    ({"horizon": None}, "horizon must be a number for a stream, got None"),
    ({"horizon": 64, "positions": "stretch"}, "positions must be 'index' for a stream"),
    ({"horizon": 64, "kdim": 8}, "kdim and vdim must equal embed_dim for a stream"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_layers_that_cannot_stream_say_why(options, message):
    layer, x = CosformerAttention(16, 4, batch_first=True, **options), torch.randn(2, 1, 16)
    state = CosformerAttention(16, 4, horizon=64).empty_state(2)
    for call, *rest in ((layer.empty_state, 2), (layer.stream, x), (layer.step, x, state)):
        with pytest.raises(ValueError, match=message):
            call(*rest)


@torch.no_grad()
def test_a_stream_names_what_is_wrong_with_its_arguments():
    layer, x = make(horizon=8), draw(1)
    state = layer.empty_state(2)
    ragged = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    far, fading = make(horizon=64).empty_state(2), make(horizon=8, decay=0.9).empty_state(2)
    wrong = [
        (x, far, ValueError, r"horizon must be the state's 64.*got 8"),
        (x, fading, ValueError, r"decay must be the state's 0\.9, got 1"),
        (x, tuple(state), TypeError, "state must be a State, got tuple"),
        (None, state, TypeError, "x must be a tensor, got NoneType"),
        (x[..., :8], state, ValueError, r"x must have .* width 16, got shape \(2, 1, 8\)"),
        (x[0], state, ValueError, "x must have a batch dimension"),
        (ragged, state, ValueError, "x must not be a nested tensor"),
    ]
    for given_x, given_state, error, message in wrong:
        for call in (layer.stream, layer.step):
            with pytest.raises(error, match=message):
                call(given_x, given_state)
    with pytest.raises(TypeError, match="state must be a State, got NoneType"):
        layer.step(x, None)
    with pytest.raises(ValueError, match="x must hold one token in step, got 3: use stream"):
        layer.step(draw(3), state)
    with pytest.raises(ValueError, match="position 0, 30 more would pass its horizon 8"):
        layer.stream(draw())
    with torch.enable_grad(), pytest.raises(ValueError, match="step records no gradients"):
        layer.step(x, state)


def test_a_step_goes_by_the_implementation_of_the_layer():
    layer = CosformerAttention(16, 4, batch_first=True, horizon=8, impl="triton").double()
    with torch.no_grad(), pytest.raises(ValueError, match="impl='triton' needs"):
        layer.step(torch.randn(1, 1, 16).double(), layer.empty_state(1))


def test_a_layer_does_not_share_the_horizon_it_was_given():
    horizon = torch.tensor([40.0, 90.0], dtype=torch.float64)
    layer, x = make(horizon=horizon, num_kv_heads=2), draw()
    before, state = layer.stream(x)
    horizon.fill_(31.0)
    assert layer.horizon.tolist() == state.horizon.tolist() == [40.0, 90.0]
    assert torch.equal(layer.stream(x)[0], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_shares_the_decays_of_its_layer_so_that_no_step_compares_them(dtype, monkeypatch):
    layer, x = make(horizon=64, decay="multiscale").to(dtype), draw().to(dtype)
    with torch.no_grad():
        _, state = layer.stream(x)
        monkeypatch.setattr(torch.Tensor, "__eq__", None)  # a comparison would wait for a GPU
        layer.step(x[:, :1], state)
        _, state = layer.stream(x[:, :2], state)
        layer.step(x[:, :1], state)


@pytest.mark.slow
def test_a_compiled_stream_knows_a_state_of_another_horizon():
    layers = [make(horizon=horizons, num_kv_heads=2) for horizons in ([40.0, 90.0], [40.0, 91.0])]
    torch._dynamo.reset()
    fast = torch.compile(layers[0].stream, fullgraph=True, backend="eager")
    x = draw()
    state, other = (layer.stream(x[:, :20])[1] for layer in layers)
    assert_close(fast(x[:, 20:], state), layers[0].stream(x[:, 20:], state))
    with pytest.raises(RuntimeError, match="horizon must be the state's"):
        fast(x[:, 20:], other)
