"""convert puts cosFormer into stock models, and nothing of theirs goes around it."""

import copy
import io

import pytest
import torch
from layer_formula import quadratic
from torch import nn

from cosformer.nn import CosformerAttention, convert

CAUSAL = nn.Transformer.generate_square_subsequent_mask


def encoder(layers=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, layers)


def transformer(**options):
    torch.manual_seed(0)
    return nn.Transformer(16, 4, 2, 2, 32, **{"batch_first": True, **options})


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
    mask = CAUSAL(7) if masked == "causal" else None
    with mode():
        out = model(x, mask=mask, src_key_padding_mask=padding)
        expected = x
        for layer in model.layers:
            expected = by_hand(layer, expected, padding, causal=masked == "causal")
    torch.testing.assert_close(out, expected)


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
@torch.no_grad()
def test_a_layer_put_in_by_hand_is_not_bypassed_either():
    model, x = encoder().eval(), torch.randn(2, 7, 16)
    for layer in model.layers:
        layer.self_attn = CosformerAttention(16, 4, batch_first=True).eval()
    torch.testing.assert_close(model(x), by_hand(model.layers[1], by_hand(model.layers[0], x)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@torch.no_grad()
def test_nested_padding_is_refused_where_only_the_layers_were_converted():
    model, x = encoder().eval(), torch.randn(2, 7, 16)
    for layer in model.layers:
        convert(layer)
    with pytest.raises(ValueError, match="use_nested_tensor = False"):
        model(x, src_key_padding_mask=torch.arange(7) >= torch.tensor([[7], [4]]))


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
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_stock_transformer_is_causal_and_ignores_padding_in_every_mode(options, bias):
    model = transformer(bias=bias, dropout=0.0, **options)
    convert(model, horizon=32)
    batch_first = options.get("batch_first", True)
    source, target = torch.randn(2, 9, 16), torch.randn(2, 6, 16)
    source_padding = torch.arange(9) >= torch.tensor([[9], [5]])
    target_padding = torch.arange(6) >= torch.tensor([[4], [6]])

    def run(source, target):
        if not batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        out = model(
            source,
            target,
            tgt_mask=CAUSAL(target.shape[1 if batch_first else 0], dtype=torch.bool),
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding,
        )
        return out if batch_first else out.transpose(0, 1)

    out = run(source, target)
    later = torch.cat([target[:, :3], torch.randn(2, 3, 16)], 1)
    torch.testing.assert_close(run(source, later)[:, :3], out[:, :3])
    assert not torch.allclose(run(source, later)[:, 3:], out[:, 3:])
    poisoned = source.masked_fill(source_padding[..., None], 1e3)
    torch.testing.assert_close(run(poisoned, target), out)
    model.eval()
    torch.testing.assert_close(run(source, target), out)  # no dropout: the modes agree
    with torch.no_grad():
        torch.testing.assert_close(run(source, target), out)


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
    torch.manual_seed(1)
    source, target = torch.randn(8, 9, 16), torch.randn(8, 6, 16)
    losses = []
    for _ in range(10):
        loss = (model(source, target, tgt_mask=CAUSAL(6)) - target.roll(1, 1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    same = [name for name, p in after.items() if torch.equal(p, values[name])]
    assert same == ["encoder.layers.0.self_attn.in_proj_weight"]  # the frozen one


@torch.no_grad()
def test_checkpoints_go_both_ways_between_converted_and_stock_models():
    stock, converted = transformer().eval(), transformer().eval()
    convert(converted, horizon=32)
    for p in stock.parameters():
        p.add_(0.1 * torch.randn_like(p))
    assert list(stock.state_dict()) == list(converted.state_dict())
    converted.load_state_dict(stock.state_dict())
    again = transformer().eval()
    again.load_state_dict(converted.state_dict())
    source, target = torch.randn(2, 9, 16), torch.randn(2, 6, 16)
    torch.testing.assert_close(again(source, target), stock(source, target))
    convert(stock, horizon=32)
    torch.testing.assert_close(converted(source, target), stock(source, target))


@pytest.mark.usefixtures("no_fast_path")
@torch.no_grad()
def test_copies_and_pickles_of_a_converted_model_compute_the_same():
    model = encoder().eval()
    convert(model, horizon=32)
    x, padding = torch.randn(2, 7, 16), torch.arange(7) >= torch.tensor([[7], [4]])
    expected = model(x, src_key_padding_mask=padding)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(twin(x, src_key_padding_mask=padding), expected)


def test_what_a_layer_has_is_kept():
    model = encoder().to(torch.bfloat16).eval()
    attention = model.layers[0].self_attn
    attention.in_proj_bias.requires_grad_(False)
    seen = []
    handle = attention.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    random = torch.get_rng_state()
    convert(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.layers[0].self_attn is attention
    assert type(attention) is CosformerAttention
    assert not attention.training
    assert attention.in_proj_weight.dtype == torch.bfloat16
    assert not attention.in_proj_bias.requires_grad
    model(torch.randn(2, 5, 16, dtype=torch.bfloat16))
    assert seen == [CosformerAttention]
    handle.remove()
    model.train()
    assert attention.training


def test_other_widths_are_converted():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 4, kdim=10, vdim=6, batch_first=True)

    model = Model()
    assert convert(model) == ["attend"]
    query, key, value = torch.randn(2, 5, 16), torch.randn(2, 7, 10), torch.randn(2, 7, 6)
    expected, _ = quadratic(model.attend, query, key, value)
    torch.testing.assert_close(
        model.attend(query, key, value)[0].double(), expected, atol=1e-5, rtol=1e-4
    )


def test_a_shared_layer_stays_shared():
    shared = nn.MultiheadAttention(16, 4)
    model = nn.ModuleDict({"one": nn.ModuleList([shared]), "other": shared})
    assert convert(model) == ["one.0", "other"]
    assert model["one"][0] is model["other"]
    assert type(model["other"]) is CosformerAttention


def test_a_model_that_is_an_attention_layer_becomes_one():
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    assert convert(model, horizon=16) == [""]
    x = torch.randn(2, 6, 16)
    expected, _ = quadratic(model, x, x, x, horizon=16)
    torch.testing.assert_close(model(x, x, x)[0].double(), expected, atol=1e-5, rtol=1e-4)


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


REFUSED = {
    "subclass": (lambda: Noisy(16, 4), {}, "1 must be a plain .*got Noisy.*skip"),
    "own forward": (patched, {}, "1 must be a plain nn.MultiheadAttention"),
    "parametrised": (parametrised, {}, "1 must be a plain .*ParametrizedMultiheadAttention"),
    "bias_kv": (
        lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
        {},
        "1 cannot be converted: add_bias_kv must be False",
    ),
    "zero_attn": (
        lambda: nn.MultiheadAttention(16, 4, add_zero_attn=True),
        {},
        "1 cannot be converted: add_zero_attn must be False",
    ),
    "other number of heads": (
        lambda: nn.MultiheadAttention(16, 2),
        {"horizon": [1.0, 2.0, 3.0, 4.0]},
        "1 cannot be converted: horizon must be a number or one per head",
    ),
    "unknown weight": (lambda: nn.Identity(), {"weight": "sine"}, "0 cannot .*weight must be"),
    "unknown name": (lambda: nn.Identity(), {"skip": ["2.*"]}, r"skip must match .*'2\.\*'.*'0'"),
}


@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_converted_is_refused_and_nothing_changed(make, options, message):
    model = nn.ModuleList([nn.MultiheadAttention(16, 4), make()])
    with pytest.raises(ValueError, match=message):
        convert(model, **options)
    assert type(model[0]) is nn.MultiheadAttention


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match=r"model must contain an nn\.MultiheadAttention"):
        convert(nn.Linear(2, 2))


def test_convert_is_at_the_top_of_the_package():
    import cosformer

    assert cosformer.convert is convert


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
@torch.no_grad()
def test_a_model_compiled_before_its_conversion_follows_it():
    torch._dynamo.reset()
    model, x = encoder(1).eval(), torch.randn(2, 7, 16)
    compiled = torch.compile(model, backend="eager")
    softmax = compiled(x)
    convert(model)
    torch.testing.assert_close(compiled(x), by_hand(model.layers[0], x))
    assert not torch.allclose(compiled(x), softmax)
