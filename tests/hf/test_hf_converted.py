"""Models some of whose layers are cosFormer: their numbers, how they load, and what they refuse."""

import gc
import warnings
import weakref

import hf_cases as cases
import pytest
import torch
from transformers import AutoModel, BertForSequenceClassification

import cosformer
import cosformer.hf as hf

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def replaced(model, kinds=("cosformer-multiscale", "softmax"), features=32, **given):
    """The model with these layers, and their names."""
    names, sizes = hf.find_layers(model)
    plan = hf.ConvertedConfig(dict(zip(names, kinds, strict=True)), sizes, features, **given)
    hf.replace_attention(model, plan)
    for heads in hf.heads_of(model).values():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return names


def masks(x, side):
    mask = torch.ones_like(x)
    mask[1, : 5 if side == "left" else None] = 0
    if side == "right":
        mask[1] = 1 - mask[1].flip(0)
        mask[1, :7] = 1
    return mask


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("make", [cases.bert, cases.gpt2])
def test_a_model_without_replacements_says_what_it_said(make, side):
    model, x = make("sdpa"), cases.tokens()
    mask = None if side is None else masks(x, side)
    wanted = model(x, attention_mask=mask)[0]
    hf.find_layers(model)
    found = model(x, attention_mask=mask)[0]
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(found[real], wanted[real], **CLOSE)


def test_nothing_holds_a_model_whose_layers_were_found():
    model = cases.bert("sdpa")
    hf.find_layers(model)
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("kind", hf.REPLACEMENTS)
@pytest.mark.parametrize("features", [0, 16, 40])
def test_a_replaced_layer_is_the_op_on_mapped_queries_and_keys(kind, features):
    model = cases.bert("sdpa")
    (name, _) = replaced(model, (kind, "softmax"), features, horizon=8192)
    heads = hf.heads_of(model)[name]
    q, k, v = torch.randn(3, 2, 2, 12, 16)
    found, _ = hf.converted_attention(model.get_submodule(name), q, k, v, None)
    if features:
        q = torch.einsum("bhtd,hdf->bhtf", q, heads.query_map) + heads.query_bias
        k = torch.einsum("bhtd,hdf->bhtf", k, heads.key_map) + heads.key_bias
    decay = None
    if kind == "cosformer-multiscale":
        decay = 2 ** (-24 / 8192) * heads.decay_logit.double().sigmoid()
    wanted = cosformer.attention(q, k, v, horizon=8192, decay=decay)
    torch.testing.assert_close(found.transpose(1, 2), wanted, **CLOSE)


def test_a_new_map_begins_as_the_identity_and_keeps_both_signs_at_two_widths():
    for features in (16, 32):
        heads = hf.ConvertedHeads("cosformer", 2, 1, 16, features=features, horizon=64)
        q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16)
        mapped, _ = heads(q, k)
        assert torch.equal(mapped, torch.cat([q, -q], -1)[..., :features])


def test_layers_of_grouped_heads_can_be_replaced():
    model, x = cases.llama("sdpa"), cases.tokens()
    with warnings.catch_warnings(action="ignore"):  # of rotated queries
        replaced(model)
        found = model(x).logits
    assert found.isfinite().all()
    assert hf.heads_of(model)["model.layers.0.self_attn"].key_map.shape == (2, 8, 32)


def test_packed_sequences_do_not_see_each_other():
    model, x = cases.gpt2("sdpa"), cases.tokens(1, 12)
    replaced(model)
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = model(x, position_ids=positions, use_cache=False).logits
    parts = [model(part).logits for part in x.split([5, 7], 1)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), **CLOSE)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be None"):
        model(x, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


def test_a_model_with_both_kinds_of_layers_generates_as_it_reads():
    model, x = cases.gpt2("sdpa"), cases.tokens()
    replaced(model)
    options = {"max_new_tokens": 5, "pad_token_id": 0, "attention_mask": masks(x, "left")}
    wanted = model.generate(x, use_cache=False, **options)
    assert torch.equal(model.generate(x, **options), wanted)
    with pytest.raises(ValueError, match="past_key_values must be a DynamicCache"):
        model.generate(x, past_key_values=hf.CosformerCache(), **options)


def test_a_replaced_model_loads_below_a_head_and_from_below_one(tmp_path):
    model, x = cases.bert("sdpa"), cases.tokens()
    replaced(model)
    wanted = model(x)[0]
    model.save_pretrained(tmp_path / "bare")
    headed = BertForSequenceClassification.from_pretrained(tmp_path / "bare").eval()
    assert torch.equal(headed.bert(x)[0], wanted)
    assert 0 < headed.classifier.weight.std() < 0.1  # what no checkpoint has is drawn anew
    headed.save_pretrained(tmp_path / "headed")
    again = AutoModel.from_pretrained(tmp_path / "headed").eval()
    assert torch.equal(again(x)[0], wanted)
    assert not again.is_quantized
    half = AutoModel.from_pretrained(tmp_path / "headed", dtype=torch.bfloat16).eval()
    assert half(x)[0].dtype == torch.bfloat16


def test_a_saved_config_with_errors_is_named():
    sizes = (2, 2, 16)
    with pytest.raises(ValueError, match="attention of a layer must be one of"):
        hf.ConvertedConfig({"a": "linear"}, sizes)
    with pytest.raises(ValueError, match="sizes must be heads, key heads and the width"):
        hf.ConvertedConfig({}, (2, 2))
    with pytest.raises(ValueError, match="layers must name modules of the model, got 'none'"):
        hf.replace_attention(cases.bert("sdpa"), hf.ConvertedConfig({"none": "softmax"}, sizes))
    with pytest.raises(ValueError, match=r"horizon must be one before which .* got 64"):
        replaced(cases.bert("sdpa"), horizon=64)
    with pytest.raises(ValueError, match="features must be 0 or at least a head's 16, got 8"):
        replaced(cases.bert("sdpa"), features=8)


def test_files_for_a_gpu_are_hidden_here_too(request):
    hidden = [
        each.collect_ignore_glob
        for each in request.config.pluginmanager.get_plugins()
        if hasattr(each, "collect_ignore_glob")
    ]
    assert hidden
    assert all("*_gpu.py" in each for each in hidden) or torch.cuda.is_available()
