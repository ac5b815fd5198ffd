"""convert puts cosFormer into stock models, which go on training, saving and loading."""

import pytest
import torch
from layer_formula import quadratic
from torch import nn
from torch.testing import assert_close

from cosformer import convert
from cosformer.nn import CosformerAttention

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
    "other heads": (
        softmax(16, 2),
        {"horizon": [1.0, 2, 3, 4]},
        "1 cannot .*: horizon must",
    ),
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
