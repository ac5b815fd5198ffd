"""`generate` of native models: every way, with a cache and without, writes the same."""

import copy

import hf_cases as cases
import pytest
import torch
from test_hf_cache import WAYS, left_padded, written
from transformers import DynamicCache

import cosformer.hf as hf
from cosformer.models import Sampling, generate
from cosformer.tasks import Bytes

MECHANISMS = ("cosformer", "cosformer-multiscale", "cosformer-gated softmax", "delta local")


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_changes_nothing(mechanism, way):
    model, x = cases.native(mechanism=mechanism, conv=4), cases.tokens()
    mask = left_padded(x)
    found, expected = (
        written(model, x, way, attention_mask=mask, use_cache=cache) for cache in (True, False)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_greedy_texts_are_those_of_our_own_generate(mechanism):
    model, x = cases.native(mechanism=mechanism), cases.tokens()
    prompts = [x[0, 4:].tolist(), x[1].tolist()]
    expected = generate(hf.to_cosformer(model), prompts, Sampling(max_new_tokens=7, temperature=0))
    found = written(model, x, "greedy", attention_mask=left_padded(x))
    assert found[:, 12:].tolist() == expected


def test_a_text_goes_on_from_a_returned_cache():
    model, x = cases.native(), cases.tokens()
    first = written(model, x, "greedy", return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == 18  # the last token is not read
    more = torch.cat([first.sequences, x[:, :3]], 1)
    again = copy.deepcopy(first.past_key_values)
    found = written(model, more, "greedy", past_key_values=again)
    assert torch.equal(found, written(model, more, "greedy"))


def test_a_prompt_may_be_read_in_pieces():
    model, x, cache = cases.native(), cases.tokens(), hf.ModelCache()
    found = written(model, x, "greedy", prefill_chunk_size=5, past_key_values=cache)
    assert torch.equal(found, written(model, x, "greedy"))


OTHER_WAYS = {
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 2},
    "shares": {"do_sample": True, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "ends": {"eos_token_id": list(range(90))},
    "guided": {"guidance_scale": 1.5},
    "any cache": {"cache_implementation": "static"},  # Transformers says that it is ignored
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_options_of_generate_work_with_and_without_a_cache(way):
    model, x, options = cases.native(), cases.tokens(), OTHER_WAYS[way]
    caches = (True,) if way == "any cache" else (True, False)
    found = []
    for cache in caches:
        torch.manual_seed(2)
        found.append(
            model.generate(x, max_new_tokens=7, pad_token_id=0, use_cache=cache, **options)
        )
    assert torch.equal(found[0], found[-1])
    assert torch.equal(found[0], written(model, x, "greedy")) == (way == "any cache")


@pytest.mark.parametrize("beams", [1, 2])
def test_a_stop_string_ends_a_text(beams):
    tokenizer = hf.create_tokenizer(Bytes().tokenizer())
    model, x = cases.native(vocab_size=100), cases.tokens(batch=1)  # each token is a character
    whole = written(model, x, "greedy", num_beams=beams)
    end = chr(whole[0, 14])
    more = {"stop_strings": [end], "tokenizer": tokenizer}
    found = written(model, x, "greedy", num_beams=beams, **more)
    assert torch.equal(found, whole[:, : found.shape[1]])
    assert found.shape[1] <= 15
    assert chr(found[0, -1]) == end


@pytest.mark.parametrize("way", WAYS)
def test_vectors_in_place_of_tokens_write_the_same(way):
    model, x = cases.native(conv=3), cases.tokens()
    given = {"attention_mask": left_padded(x), "inputs_embeds": model.get_input_embeddings()(x)}
    expected = written(model, x, way, attention_mask=left_padded(x))[:, 12:]
    for cache in (True, False):
        torch.manual_seed(2)
        more = {**WAYS[way], **given, "use_cache": cache}
        assert torch.equal(model.generate(max_new_tokens=7, pad_token_id=0, **more), expected)


def test_what_generate_tells_of_itself_is_that_of_the_full_pass():
    model, x = cases.native(), cases.tokens()
    asked = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    found = written(model, x, "greedy", **asked)
    with torch.no_grad():
        whole = model(found.sequences[:, :-1], output_hidden_states=True)
    torch.testing.assert_close(torch.stack(found.logits, 1), whole.logits[:, 11:])
    for layer, expected in enumerate(whole.hidden_states):
        steps = torch.cat([each[layer] for each in found.hidden_states], 1)
        torch.testing.assert_close(steps, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_compiled_model_writes_the_same():
    torch._dynamo.reset()
    model, x = cases.native(), cases.tokens()
    expected = written(model, x, "greedy", attention_mask=left_padded(x))
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(written(model, x, "greedy", attention_mask=left_padded(x)), expected)


def test_gradients_go_through_the_cache():
    model, x = cases.native(), cases.tokens()
    begun = model(x[:, :6], use_cache=True)
    last = model(x[:, 6:7], past_key_values=begun.past_key_values).logits
    whole = model(x[:, :7]).logits[:, -1:]
    found, expected = (
        torch.autograd.grad(out.sum(), model.lm_head.weight)[0] for out in (last, whole)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_logits_of_the_last_tokens_are_had_alone():
    model, x = cases.native(), cases.tokens()
    assert torch.equal(model(x, logits_to_keep=2).logits, model(x).logits[:, -2:])
    with pytest.raises(ValueError, match="logits_to_keep must be a whole number from 0 on, got -1"):
        model(x, logits_to_keep=-1)


def test_what_cannot_be_written_is_refused_by_its_name():
    model, x = cases.native(), cases.tokens()
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        written(model, x[:1], "greedy", prompt_lookup_num_tokens=2)
    with pytest.raises(TypeError, match="past_key_values must be a ModelCache, got DynamicCache"):
        written(model, x, "greedy", past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="a real token behind it, got other padding in row 0"):
        written(model, x, "greedy", attention_mask=left_padded(x).flip(1))
    absolute = cases.native(mechanism="spe")
    with pytest.raises(ValueError, match="key_mask must be all True in a stream with mechanism="):
        written(absolute, x, "greedy", attention_mask=left_padded(x))
    with pytest.raises(ValueError, match="length must be at most max_length=64, got 65"):
        cases.native(positions="learned").generate(x, max_new_tokens=60)
    with pytest.raises(ValueError, match="use_cache must be False for a model that is not causal"):
        hf.CosformerModel(hf.CosformerConfig(causal=False))(x, use_cache=True)
