"""What Transformers asks of its own models, asked of ours; other files of this folder have more:
saving, tied and resized weights, half precision, checkpointing, adapters, ways of `generate`."""

import hf_cases as cases
import pytest
import torch
from test_hf_cache import left_padded
from test_hf_models import KINDS, padded
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    pipeline,
)

import cosformer.hf as hf
from cosformer.tasks import Bytes

every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind, **given):
    return cases.native(KINDS[kind][0], **given)


@every_kind
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_in_place_of_tokens_give_the_same(kind, pooling):
    if pooling == "cls" and kind != "classifier":
        pytest.skip("pooling is a classifier's")
    model, x = made(kind, conv=3, pooling=pooling), cases.tokens()
    vectors = model.get_input_embeddings()(x)
    for mask in (None, padded(x)):
        found = model(inputs_embeds=vectors, attention_mask=mask).logits
        real = slice(None) if mask is None or kind == "classifier" else mask.bool()
        assert torch.equal(found[real], model(x, attention_mask=mask).logits[real])
    (gradient,) = torch.autograd.grad(found[real].sum(), vectors)
    assert gradient[padded(x).bool()].abs().amin(-1).gt(0).any()
    assert gradient[~padded(x).bool()].abs().max() == 0  # nobody looks at padding


@every_kind
def test_hidden_states_are_what_each_block_is_given_and_gives(kind):
    model, x = (
        made(kind, num_hidden_layers=3, mechanism="cosformer-gated softmax cosformer"),
        cases.tokens(),
    )
    model.gradient_checkpointing_enable()
    seen, backbone = [], model.model.backbone
    backbone.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for block in backbone.blocks[:-1]:
        block.register_forward_hook(lambda _, given, out: seen.append(out))
    found = model(x, output_hidden_states=True).hidden_states
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found[:-1], seen, strict=True))
    assert torch.equal(found[-1], model.model(x).last_hidden_state)
    mask = padded(x)
    shifted = model(x, attention_mask=mask, output_hidden_states=True).hidden_states
    rows = [row[real.bool()] for row, real in zip(x, mask, strict=True)]
    for n, row in enumerate(rows):  # each as if it were alone, where its tokens stand
        alone = model(row[None], output_hidden_states=True).hidden_states
        for one, other in zip(shifted, alone, strict=True):
            torch.testing.assert_close(one[n][mask[n].bool()], other[0], atol=1e-5, rtol=1e-4)
    model.config.output_hidden_states = True
    assert len(model(x).hidden_states) == 4


@every_kind
def test_hidden_states_keep_gradients(kind):
    model, x = made(kind).train(), cases.tokens()
    out = model(x, attention_mask=padded(x), output_hidden_states=True)
    for each in out.hidden_states:
        each.retain_grad()
    out.logits.sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in out.hidden_states)


@every_kind
def test_a_tuple_has_what_the_named_output_has(kind):
    model, x = made(kind), cases.tokens()
    labels = torch.tensor([1, 0]) if kind == "classifier" else x
    given = {"labels": labels, "output_hidden_states": True}
    named, plain = model(x, **given), model(x, return_dict=False, **given)
    torch.testing.assert_close(plain, named.to_tuple(), rtol=0, atol=0)
    assert torch.equal(model(x, torch.ones_like(x)).logits, model(x).logits)


@every_kind
def test_nothing_is_missing_or_unexpected_in_what_was_saved(kind, tmp_path):
    model = made(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, told = KINDS[kind][1].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    same = model.state_dict()
    assert all(torch.equal(x, same[name]) for name, x in loaded.state_dict().items())


def test_a_head_of_another_size_is_made_anew_where_that_is_asked_for(tmp_path):
    model, x = made("classifier", num_labels=3), cases.tokens()
    model.save_pretrained(tmp_path)
    given = {"num_labels": 5, "ignore_mismatched_sizes": True}
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, **given)
    assert loaded(x).logits.shape == (2, 5)
    assert torch.equal(loaded.model(x).last_hidden_state, model.model(x).last_hidden_state)


PROBLEMS = {
    "regression": (1, torch.rand(2), torch.nn.functional.mse_loss),
    "single_label_classification": (3, torch.tensor([2, 0]), torch.nn.functional.cross_entropy),
    "multi_label_classification": (
        3,
        torch.ones(2, 3),
        torch.nn.functional.binary_cross_entropy_with_logits,
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_loss_of_a_classifier_is_that_of_its_problem(problem):
    labels, asked, loss = PROBLEMS[problem]
    model, x = made("classifier", num_labels=labels, problem_type=problem), cases.tokens()
    out = model(x, labels=asked)
    torch.testing.assert_close(out.loss, loss(out.logits.squeeze(-1), asked))


DEVICES = ("cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"})


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_map_of_devices_changes_no_number(devices, tied, tmp_path):
    pytest.importorskip("accelerate")
    model, x = made("decoder", tie_word_embeddings=tied), cases.tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=devices)
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert torch.equal(*(each.generate(x, max_new_tokens=4) for each in (loaded, model)))


def test_weights_that_are_left_on_a_disk_are_refused(tmp_path):
    pytest.importorskip("accelerate")
    made("decoder", tie_word_embeddings=False).save_pretrained(tmp_path)
    devices = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match=r"device_map must keep all weights .* got lm_head"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map=devices, offload_folder=tmp_path / "disk"
        )


@pytest.mark.parametrize("mechanism", ["cosformer-gated", "performer", "linformer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_can_be_made_in_half_precision(mechanism, dtype):
    config = made("masked-lm", mechanism=mechanism).config
    model = AutoModelForMaskedLM.from_config(config, dtype=dtype).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(cases.tokens()).logits.isfinite().all()


def test_a_prompt_of_vectors_is_tuned():
    peft = pytest.importorskip("peft")
    x, sizes = cases.tokens(), {"token_dim": 32, "num_layers": 2, "num_attention_heads": 2}
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes)
    model = peft.get_peft_model(made("decoder"), config)
    model(input_ids=x, labels=x).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "prompt_encoder.default.embedding.weight"
    ]
    mask = left_padded(x)  # behind the vectors
    options = {"max_new_tokens": 5, "do_sample": False}
    for cache in (True, False):
        given = {"input_ids": x, "attention_mask": mask, "use_cache": cache}
        written = model.eval().generate(**given, **options)[:, 12:]
        for row, real, text in zip(x, mask.bool(), written, strict=True):
            assert torch.equal(model.generate(input_ids=row[real][None], **options)[0, -5:], text)


PIPELINES = {
    "text-generation": (
        "decoder",
        "To be",
        {"max_new_tokens": 4, "do_sample": False},
        "generated_text",
    ),
    "text-classification": ("classifier", "To be", {}, "label"),
    "fill-mask": ("masked-lm", "To <mask>e", {}, "token_str"),
    "feature-extraction": ("decoder", "To be", {}, None),
}


@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines_take_a_folder(task, tmp_path):
    kind, text, options, key = PIPELINES[task]
    model = made(kind, vocab_size=260, pad_token_id=256)
    model.save_pretrained(tmp_path)
    tokenizer = hf.create_tokenizer(Bytes().tokenizer())
    tokenizer.save_pretrained(tmp_path)
    found = pipeline(task, str(tmp_path))([text, f"{text}, or not"], batch_size=2, **options)
    alone = pipeline(task, str(tmp_path))(text, **options)
    assert len(found) == 2
    if key is None:
        expected = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(torch.tensor(alone), expected.detach(), atol=1e-6, rtol=1e-5)
    else:
        one = found[0] if isinstance(found[0], list) else found[:1]
        assert [each[key] for each in one] == [each[key] for each in alone]
