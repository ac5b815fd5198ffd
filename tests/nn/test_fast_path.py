"""The eval-time fast path of nn.TransformerEncoder never goes around a converted layer."""

import copy
import io

import pytest
import torch
from layer_formula import quadratic
from torch import nn
from torch.testing import assert_close

from cosformer.nn import CosformerAttention, convert


def encoder(layers=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, layers)


def by_hand(layer, x, mask=None, causal=False):
    """A post-norm encoder layer around the quadratic formula."""
    scale = None if mask is None else ~mask
    attended, _ = quadratic(layer.self_attn, x, x, x, causal=causal, key_scale=scale)
    x = layer.norm1(x + attended.to(x.dtype))
    return layer.norm2(x + layer.linear2(layer.linear1(x).relu()))


@pytest.fixture
def no_fast_path(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the softmax fast path was taken")

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", refuse)
    monkeypatch.setattr(torch, "_native_multi_head_attention", refuse)
    monkeypatch.setattr(torch, "_nested_tensor_from_mask", refuse)


@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.parametrize("masked", ["none", "padding", "causal"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_fast_path_cannot_bypass_a_converted_encoder(masked, mode):
    model = encoder().eval()
    convert(model)
    x = torch.randn(2, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [4]]) if masked == "padding" else None
    mask = nn.Transformer.generate_square_subsequent_mask(7) if masked == "causal" else None
    with mode():
        out = model(x, mask=mask, src_key_padding_mask=padding)
        expected = x
        for layer in model.layers:
            expected = by_hand(layer, expected, padding, causal=masked == "causal")
    assert_close(out, expected)


def test_the_fast_path_is_what_an_unconverted_encoder_takes(no_fast_path):
    """Else the test above would prove nothing."""
    model, x = encoder().eval(), torch.randn(2, 7, 16)
    with torch.no_grad():
        with pytest.raises(AssertionError, match="fast path"):
            model(x)
        padding = torch.arange(7) >= torch.tensor([[7], [4]])
        with pytest.raises(AssertionError, match="fast path"):
            model(x, src_key_padding_mask=padding)


@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # said by torch, and true
@torch.no_grad()
def test_an_encoder_built_from_a_layer_put_in_by_hand_is_not_bypassed():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.self_attn = CosformerAttention(16, 4, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    expected = by_hand(model.layers[1], by_hand(model.layers[0], x, padding), padding)
    assert_close(model(x, src_key_padding_mask=padding), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@torch.no_grad()
def test_nested_padding_is_refused_where_only_the_layers_were_converted():
    model, x = encoder().eval(), torch.randn(2, 7, 16)
    for layer in model.layers:
        convert(layer)
    with pytest.raises(ValueError, match="use_nested_tensor = False"):
        model(x, src_key_padding_mask=torch.arange(7) >= torch.tensor([[7], [4]]))


@pytest.mark.usefixtures("no_fast_path")
@torch.no_grad()
def test_copies_and_pickles_of_a_converted_model_compute_the_same():
    model = encoder().eval()
    convert(model, horizon=[32.0, 20.0, 40.0, 9.0])
    x, padding = torch.randn(2, 7, 16), torch.arange(7) >= torch.tensor([[7], [4]])
    expected = model(x, src_key_padding_mask=padding)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_close(twin(x, src_key_padding_mask=padding), expected)


@pytest.mark.slow
@torch.no_grad()
def test_a_model_compiled_before_its_conversion_follows_it():
    torch._dynamo.reset()
    model, x = encoder(1).eval(), torch.randn(2, 7, 16)
    compiled = torch.compile(model, backend="eager")
    softmax = compiled(x)
    convert(model)
    assert_close(compiled(x), by_hand(model.layers[0], x))
    assert not torch.allclose(compiled(x), softmax)
