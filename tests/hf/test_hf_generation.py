"""`generate` of native models: every way, with a cache and without, writes the same."""

import copy

import hf_cases as cases
import pytest
import torch
from test_hf_cache import WAYS, left_padded, written
from transformers import DynamicCache

import cosformer.hf as hf
from cosformer.models import Sampling, generate

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


def test_what_cannot_be_written_is_refused_by_its_name():
    model, x = cases.native(), cases.tokens()
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        written(model, x[:1], "greedy", prompt_lookup_num_tokens=2)
    with pytest.raises(TypeError, match="past_key_values must be a ModelCache, got DynamicCache"):
        written(model, x, "greedy", past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="key_mask must have padding before the first real token"):
        written(model, x, "greedy", attention_mask=left_padded(x).flip(1))
    absolute = cases.native(mechanism="spe")
    with pytest.raises(ValueError, match="key_mask must be all True in a stream with mechanism="):
        written(absolute, x, "greedy", attention_mask=left_padded(x))
    with pytest.raises(ValueError, match="length must be at most max_length=64, got 65"):
        cases.native(positions="learned").generate(x, max_new_tokens=60)
    with pytest.raises(ValueError, match="use_cache must be False for a model that is not causal"):
        hf.CosformerModel(hf.CosformerConfig(causal=False))(x, use_cache=True)
