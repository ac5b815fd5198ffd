"""Native models: the numbers of `cosformer.models` behind the classes of Transformers."""

import copy

import hf_cases as cases
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

import cosformer.hf as hf
from cosformer.models import ModelConfig, create_model

KINDS = {
    "decoder": (hf.CosformerForCausalLM, AutoModelForCausalLM, {}),
    "masked-lm": (hf.CosformerForMaskedLM, AutoModelForMaskedLM, {}),
    "classifier": (
        hf.CosformerForSequenceClassification,
        AutoModelForSequenceClassification,
        {"classes": 3, "pooling": "cls"},
    ),
}
CONFIGS = {
    "paper": {"mechanism": "cosformer", "positions": "learned"},
    "hybrid": {"mechanism": cases.HYBRID, "layers": 6, "positions": "auto", "gate": "sigmoid"},
    "wide": {"mechanism": "cosformer-multiscale", "options": {"learned": True}, "value_dim": 24,
             "key_heads": 1, "qk_norm": True, "norm": True, "glu": True, "conv": 3},
    "random": {"mechanism": "performer", "tied": True, "positions": "sinusoidal"},
}  # fmt: skip


def ours(kind, which="hybrid", **given):
    config = {"width": 32, "max_length": 64, **CONFIGS[which], **KINDS[kind][2], **given}
    torch.manual_seed(0)
    return create_model(ModelConfig(kind=kind, **config)).eval()


def padded(x):
    mask = torch.ones_like(x)
    mask[0, :4], mask[1, 9:] = 0, 0
    return mask


@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_to_transformers_through_a_folder_and_back(kind, which, tmp_path):
    model, x = ours(kind, which), cases.tokens()
    mask = padded(x)
    expected = model(x, mask.bool())
    hf.to_transformers(model).save_pretrained(tmp_path)
    made, auto, _ = KINDS[kind]
    loaded = auto.from_pretrained(tmp_path)
    assert (type(loaded), loaded.training) == (made, False)
    real = slice(None) if kind == "classifier" else mask.bool()
    assert torch.equal(loaded(x, attention_mask=mask).logits[real], expected[real])
    back = hf.to_cosformer(loaded)
    assert (type(back), back.config) == (type(model), model.config)
    assert torch.equal(back(x, mask.bool())[real], expected[real])


def test_the_bare_model_gives_the_vectors_of_the_backbone(tmp_path):
    model, x = ours("decoder"), cases.tokens()
    hf.to_transformers(model).save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(x).last_hidden_state, model.backbone(x))


@pytest.mark.parametrize("kind", ["decoder", "masked-lm"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_tensor_before_and_after(kind, tied, tmp_path):
    made = hf.to_transformers(ours(kind, tied=tied))
    made.save_pretrained(tmp_path)
    for model in (made, KINDS[kind][1].from_pretrained(tmp_path), copy.deepcopy(made)):
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_keep_old_tokens_and_know_new_ones(tied, tmp_path):
    model, x = cases.native(tie_word_embeddings=tied), cases.tokens()
    before = model(x).logits
    model.resize_token_embeddings(300)
    torch.testing.assert_close(model(x).logits[..., :256], before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded(torch.tensor([[299]])).logits.shape == (1, 1, 300)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert hf.to_cosformer(loaded)(x).shape[-1] == 300
    for each in (model, loaded):
        with pytest.raises(ValueError, match="below the vocabulary of 300, got 300"):
            each(torch.tensor([[300]]))


def test_new_tokens_begin_as_small_as_others_do():
    model = cases.native(tie_word_embeddings=False)
    model.resize_token_embeddings(1256, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.lm_head):
        assert 0.019 < table.weight[256:].std().item() < 0.021


def test_a_new_head_begins_as_a_fresh_one_does(tmp_path):
    cases.native(hf.CosformerForMaskedLM).save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=200)
    first, last = loaded.score[0], loaded.score[-1]
    assert first.weight.abs().max().item() <= 32**-0.5
    assert 0.018 < last.weight.std().item() < 0.022
    assert torch.equal(last.bias, torch.zeros(200))


def test_a_fresh_model_begins_as_one_of_ours_does():
    torch.manual_seed(3)
    config = ModelConfig(mechanism="cosformer-gated", positions="auto", glu=True)
    expected = create_model(config).state_dict()
    torch.manual_seed(3)
    found = hf.to_cosformer(hf.CosformerForCausalLM(hf.CosformerConfig.of(config))).state_dict()
    same = [name for name in expected if torch.equal(found[name], expected[name])]
    assert same == list(expected)


def test_losses_are_those_of_cross_entropy():
    x = cases.tokens()
    labels = torch.where(x % 3 == 0, x, -100)
    causal, masked = cases.native(), cases.native(hf.CosformerForMaskedLM)
    entropy = torch.nn.functional.cross_entropy
    expected = entropy(causal(x).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(causal(x, labels=labels).loss, expected)
    expected = entropy(masked(x).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(masked(x, labels=labels).loss, expected)
    classes, asked = cases.native(hf.CosformerForSequenceClassification), torch.tensor([1, 0])
    torch.testing.assert_close(classes(x, labels=asked).loss, entropy(classes(x).logits, asked))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_whole(dtype, tmp_path):
    model, x = cases.native(), cases.tokens()
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    expected, scale = model(x).logits, model(x).logits.abs().max().item()
    assert (half(x).logits - expected).abs().max().item() < 16 * torch.finfo(dtype).eps * scale
    assert half.generate(x, max_new_tokens=3).shape == (2, 15)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model, x = cases.native(mechanism=cases.HYBRID, num_hidden_layers=6).train(), cases.tokens()
    mask = padded(x)

    def gradients():
        model.zero_grad()
        model(x, attention_mask=mask, labels=x).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected, calls = gradients(), []
    for block in model.model.backbone.blocks:
        block.attention_norm.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(), expected)
    assert len(calls) == 12  # every block twice
    model.gradient_checkpointing_disable()
    gradients()
    assert len(calls) == 18


def test_projections_are_modules_that_adapters_find():
    model, x = cases.native(gate="silu", glu=True, conv=4), cases.tokens()
    linear = {n.split(".", 4)[-1] for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    attention = {f"attention.{n}" for n in ("in_proj", "out_proj", "gate", "controls.gate")}
    forward = {f"feed_forward.{n}" for n in ("gate", "up", "down")}
    assert linear == attention | forward | {"lm_head"}
    used = []
    model.model.backbone.blocks[1].attention.in_proj.register_forward_hook(
        lambda *_: used.append(1)
    )
    model(x)
    model.generate(x, max_new_tokens=2)
    assert len(used) == 3


def test_adapters_learn_and_merge():
    peft = pytest.importorskip("peft")
    x, given = cases.tokens(), {"target_modules": ["in_proj", "down"], "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(cases.native(), peft.LoraConfig(**given))
    optimiser = torch.optim.AdamW(adapted.parameters(), lr=0.1)
    before = adapted(input_ids=x, labels=x).loss.item()
    for _ in range(3):
        adapted(input_ids=x, labels=x).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    adapted.eval()
    out = adapted(input_ids=x, labels=x)
    assert out.loss.item() < before
    merged = hf.to_cosformer(adapted.merge_and_unload())
    torch.testing.assert_close(merged(x), out.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_attentions": True}, "output_attentions must be False for a Cosformer model"),
        ({"inputs_embeds": torch.zeros(2, 12, 32)}, "inputs_embeds must be given, got both"),
        ({"input_ids": None}, "input_ids or inputs_embeds must be given, got neither"),
        ({"input_ids": torch.zeros(2, 12, 31)}, r"or vectors \[batch, length, 32\], .* 12, 31\]"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask must be .* 12 tokens .* \[2, 5\]"),
        ({"attention_mask": torch.ones(2, 15)}, r"attention_mask must be .* after 0 .* \[2, 15\]"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_had_is_refused_by_its_name(kind, given, message):
    with pytest.raises(ValueError, match=message):
        cases.native(KINDS[kind][0])(**{"input_ids": cases.tokens(), **given})


def test_the_config_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="causal must be False for a masked-lm, got True"):
        hf.CosformerForMaskedLM(hf.CosformerConfig())
    with pytest.raises(ValueError, match="causal must be True for a decoder, got False"):
        hf.CosformerForCausalLM(hf.CosformerConfig(causal=False))
    with pytest.raises(ValueError, match=r"kind must be decoder, masked-lm or .* got 'pairs'"):
        hf.to_transformers(create_model(ModelConfig(kind="pairs", classes=2)))
    with pytest.raises(
        TypeError, match=r"model must be one of CosformerForCausalLM, .* CosformerM"
    ):
        hf.to_cosformer(hf.CosformerModel(hf.CosformerConfig()))
    with pytest.raises(TypeError, match=r"model must be one of cosformer\.models, got Linear"):
        hf.to_transformers(torch.nn.Linear(2, 2))
    config = hf.CosformerConfig()
    model = hf.CosformerForCausalLM(config)
    with pytest.raises(ValueError, match=r"attn_implementation must not be given .* 'cosformer'"):
        hf.CosformerForCausalLM._from_config(config, attn_implementation="cosformer")
    with pytest.raises(ValueError, match=r"attn_implementation must not be given .* 'cosformer'"):
        model.set_attn_implementation("cosformer")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "masked-lm"])
def test_a_compiled_model_gives_the_same_numbers(kind):
    torch._dynamo.reset()
    model, x = cases.native(KINDS[kind][0]), cases.tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in (None, padded(x)):
        out, expected = (m(x, attention_mask=mask).logits for m in (compiled, model))
        real = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(out[real], expected[real], atol=1e-5, rtol=1e-5)
