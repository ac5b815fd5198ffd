"""convert puts cosFormer into stock models, which go on training, saving and loading.

The eval-time fast path of nn.TransformerEncoder never goes around a converted layer.
"""

import copy
import io

import pytest
import torch
from layer_formula import quadratic
from torch import nn
from torch.testing import assert_close

from cosformer import convert, multiscale_decays
from cosformer.nn import CosformerAttention

PADDING = torch.arange(7) >= torch.tensor([[7], [4]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask


def transformer(**options):
    torch.manual_seed(0)
    return nn.Transformer(16, 4, 2, 2, 32, **{"batch_first": True, **options})


def test_names_of_everything_replaced_are_returned():
    model = transformer()
    assert convert(model, horizon=32) == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    ]
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    layer = model.get_submodule("decoder.layers.1.multihead_attn")
    assert isinstance(layer, CosformerAttention)
    assert (layer.horizon, layer.dropout, layer.batch_first) == (32, 0.1, True)


@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"norm_first": True}])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_stock_transformer_is_causal_and_ignores_padding_in_every_mode(options):
    model = transformer(bias="norm_first" not in options, dropout=0.0, **options)
    convert(model, horizon=32)
    turn = 0 if options.get("batch_first", True) else 1  # then [T, B, E]
    source, target = torch.randn(2, 9, 16), torch.randn(2, 6, 16)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    masks["tgt_key_padding_mask"] = torch.arange(6) >= torch.tensor([[4], [6]])

    def run(*given):
        given = (x.transpose(0, turn) for x in given)
        return model(*given, tgt_mask=CAUSAL(6, dtype=torch.bool), **masks).transpose(0, turn)

    out = run(source, target)
    later = torch.cat([target[:, :3], torch.randn(2, 3, 16)], 1)
    assert_close(run(source, later)[:, :3], out[:, :3])
    assert not torch.allclose(run(source, later)[:, 3:], out[:, 3:])
    assert_close(run(source.masked_fill(padding[..., None], 1e3), target), out)
    model.eval()  # no dropout: the modes agree
    assert_close(run(source, target), out)
    with torch.no_grad():
        assert_close(run(source, target), out)


def test_training_goes_on_with_the_optimiser_made_before():
    model = transformer()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = dict(model.named_parameters())
    model.encoder.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    convert(model, horizon=32)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    values = {name: p.detach().clone() for name, p in after.items()}
    model(torch.randn(8, 9, 16), torch.randn(8, 6, 16), tgt_mask=CAUSAL(6)).sin().mean().backward()
    optimiser.step()
    same = [name for name, p in after.items() if torch.equal(p, values[name])]
    assert same == ["encoder.layers.0.self_attn.in_proj_weight"]  # the frozen one


def test_what_a_layer_has_is_kept():
    model = nn.TransformerEncoderLayer(16, 4, batch_first=True, dtype=torch.bfloat16).eval()
    attention = model.self_attn
    attention.in_proj_bias.requires_grad_(False)
    seen = []
    attention.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    random = torch.get_rng_state()
    convert(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.self_attn is attention
    assert type(attention) is CosformerAttention
    assert not attention.training
    assert attention.in_proj_weight.dtype == torch.bfloat16
    assert not attention.in_proj_bias.requires_grad
    model(torch.randn(2, 5, 16, dtype=torch.bfloat16))
    assert seen == [CosformerAttention]
    assert model.train().self_attn.training


def test_a_model_that_is_an_attention_layer_of_other_widths_becomes_one():
    model = nn.MultiheadAttention(16, 4, kdim=10, vdim=6, batch_first=True, dtype=torch.float64)
    assert convert(model, horizon=16) == [""]
    query, key, value = (torch.randn(2, 5, width, dtype=torch.float64) for width in (16, 10, 6))
    assert_close(model(query, key, value)[0], quadratic(model, query, key, value, horizon=16)[0])


def test_a_shared_layer_stays_shared():
    shared = nn.MultiheadAttention(16, 4)
    model = nn.ModuleDict({"one": nn.ModuleList([shared]), "other": shared})
    assert convert(model) == ["one.0", "other"]
    assert model["one"][0] is model["other"]
    assert type(model["other"]) is CosformerAttention


def test_skipped_layers_keep_softmax_and_may_be_converted_otherwise_later():
    model = transformer()
    converted = convert(model, skip=["*.multihead_attn"])
    assert len(converted) == 4
    assert type(model.decoder.layers[0].multihead_attn) is nn.MultiheadAttention
    assert convert(model, positions="stretch", skip="decoder.layers.0.*") == [
        "decoder.layers.1.multihead_attn"
    ]
    assert model.decoder.layers[1].multihead_attn.positions == "stretch"
    assert model.decoder.layers[1].self_attn.positions == "index"
    model(torch.randn(2, 9, 16), torch.randn(2, 6, 16), tgt_mask=CAUSAL(6))


def test_a_decay_reaches_all_but_the_cross_attention_of_decoders():
    model = transformer(dropout=0.0)
    convert(model, horizon=32, decay="multiscale")
    for name, layer in model.named_modules():
        if isinstance(layer, CosformerAttention):
            cross = name.endswith("multihead_attn")
            assert layer.decay == (None if cross else multiscale_decays(4))
    model(torch.randn(2, 9, 16), torch.randn(2, 6, 16), tgt_mask=CAUSAL(6))
    layer, x = model.encoder.layers[0].self_attn, torch.randn(2, 9, 16)
    expected, _ = quadratic(layer, x, x, x, horizon=32, decay=multiscale_decays(4))
    assert_close(layer(x, x, x)[0], expected.float())


class Noisy(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def patched():
    layer = nn.MultiheadAttention(16, 4)
    layer.forward = lambda query, key, value: (query, None)
    return layer


def parametrised():
    layer = nn.MultiheadAttention(16, 4)
    nn.utils.parametrize.register_parametrization(layer, "in_proj_weight", nn.Identity())
    return layer


def softmax(*args, **kwargs):
    return lambda: nn.MultiheadAttention(*args, **kwargs)


REFUSED = {
    "subclass": (lambda: Noisy(16, 4), {}, "1 must be a plain .*got Noisy.*skip"),
    "own forward": (patched, {}, "1 must be a plain nn.MultiheadAttention"),
    "parametrised": (parametrised, {}, "1 must be a plain .*ParametrizedMultiheadAttention"),
    "bias_kv": (softmax(16, 4, add_bias_kv=True), {}, "1 cannot .*: add_bias_kv must be False"),
    "zero_attn": (softmax(16, 4, add_zero_attn=True), {}, "1 cannot .*: add_zero_attn must be"),
    "other heads": (softmax(16, 2), {"horizon": [1.0, 2, 3, 4]}, "1 cannot .*: horizon must"),
    "unknown decay": (nn.Identity, {"decay": "fast"}, "0 cannot .*decay must be .*multiscale"),
    "other decays": (softmax(16, 2), {"decay": [0.5] * 4}, "1 cannot .*: decay must be .*per key"),
    "unknown weight": (nn.Identity, {"weight": "sine"}, "0 cannot .*weight must be"),
    "unknown name": (nn.Identity, {"skip": ["2.*"]}, r"skip must match .*'2\.\*'.*'0'"),
    "no name": (nn.Identity, {"skip": [5]}, "skip must be a glob pattern or several, got 5 among"),
    "no names": (nn.Identity, {"skip": None}, "skip must be a glob pattern or several, got None"),
    "no number": (nn.Identity, {"horizon": "9"}, "^0 cannot be converted: horizon must .* got str"),
}


@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_converted_is_refused_and_nothing_changed(make, options, message):
    model = nn.ModuleList([nn.MultiheadAttention(16, 4), make()])
    with pytest.raises((ValueError, TypeError), match=message):
        convert(model, **options)
    assert type(model[0]) is nn.MultiheadAttention


def test_what_is_no_model_with_attention_is_refused():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got NoneType"):
        convert(None)
    with pytest.raises(ValueError, match=r"model must contain an nn\.MultiheadAttention"):
        convert(nn.Linear(2, 2))


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
    padding = PADDING if masked == "padding" else None
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
        with pytest.raises(AssertionError, match="fast path"):
            model(x, src_key_padding_mask=PADDING)


@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # said by torch, and true
@torch.no_grad()
def test_an_encoder_built_from_a_layer_put_in_by_hand_is_not_bypassed():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.self_attn = CosformerAttention(16, 4, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 7, 16)
    expected = by_hand(model.layers[1], by_hand(model.layers[0], x, PADDING), PADDING)
    assert_close(model(x, src_key_padding_mask=PADDING), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@torch.no_grad()
def test_nested_padding_is_refused_where_only_the_layers_were_converted():
    model, x = encoder().eval(), torch.randn(2, 7, 16)
    for layer in model.layers:
        convert(layer)
    with pytest.raises(ValueError, match="use_nested_tensor = False"):
        model(x, src_key_padding_mask=PADDING)


@pytest.mark.usefixtures("no_fast_path")
@torch.no_grad()
def test_copies_and_pickles_of_a_converted_model_compute_the_same():
    model = encoder().eval()
    convert(model, horizon=[32.0, 20.0, 40.0, 9.0])
    x = torch.randn(2, 7, 16)
    expected = model(x, src_key_padding_mask=PADDING)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_close(twin(x, src_key_padding_mask=PADDING), expected)


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
