"""Caches of constant size: what `generate` writes does not depend on them."""

import copy

import hf_cases as cases
import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache

import cosformer.hf as hf
from cosformer import State
from cosformer.hf.cache import StreamLayer

pytestmark = pytest.mark.filterwarnings("ignore:.*rotated by their positions")

WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "several beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
}


def written(model, x, way, **given):
    torch.manual_seed(2)
    return model.generate(x, max_new_tokens=7, pad_token_id=0, **WAYS[way], **given)


def left_padded(x):
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    return mask


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("make", [cases.gpt2, cases.opt, cases.llama])
@pytest.mark.parametrize("way", WAYS)
def test_every_cache_and_none_write_the_same(name, make, way):
    model, x = make(name), cases.tokens()
    mask = {"attention_mask": left_padded(x)}
    without = written(model, x, way, use_cache=False, **mask)
    for cache in (DynamicCache(), hf.CosformerCache()):
        assert torch.equal(written(model, x, way, past_key_values=cache, **mask), without)


@pytest.mark.parametrize("name", cases.NAMES)
def test_pieces_of_a_text_give_the_logits_of_the_whole(name):
    model, x, cache = cases.gpt2(name), cases.tokens(), hf.CosformerCache()
    with torch.no_grad():
        pieces = [x[:, :5], x[:, 5:6], x[:, 6:7], x[:, 7:]]
        found = [model(piece, past_key_values=cache).logits for piece in pieces]
        expected = model(x, use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 12


def test_gradients_go_through_the_cache():
    model, x, cache = cases.gpt2("cosformer"), cases.tokens(), hf.CosformerCache()
    model(x[:, :6], past_key_values=cache)
    last = model(x[:, 6:7], past_key_values=cache).logits
    whole = model(x[:, :7], use_cache=False).logits[:, -1:]
    found, expected = (
        torch.autograd.grad(out.sum(), model.transformer.wte.weight)[0] for out in (last, whole)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_prompt_is_read_once_for_many_texts():
    model, x, cache = cases.gpt2("cosformer"), cases.tokens(1), hf.CosformerCache()
    with torch.no_grad():
        model(x[:, :8], past_key_values=cache)
    for more in (x, torch.cat([x[:, :8], x[:, :3]], 1)):
        begun = copy.deepcopy(cache)
        out = written(model, more, "greedy", past_key_values=begun)
        assert torch.equal(out, written(model, more, "greedy"))


def test_rows_are_chosen_and_repeated_in_every_tensor_but_those_of_heads():
    state = State.empty(3, 3, 4, 4, horizon=torch.tensor([50.0, 60.0, 70.0]))
    state.key_value.normal_()
    layer = StreamLayer()
    layer.state = (state, "name", 3, None)
    layer.reorder_cache(torch.tensor([2, 0]))
    chosen, *others = layer.state
    assert (others, chosen.horizon is state.horizon) == (["name", 3, None], True)
    assert torch.equal(chosen.key_value, state.key_value[[2, 0]])
    cache, model = hf.CosformerCache(), cases.gpt2("cosformer")
    first = model(cases.tokens(3), past_key_values=cache).logits
    before = cache.layers[1].state.key_sum
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1, 5]))
    assert torch.equal(cache.layers[1].state.key_sum, before[[0, 2]])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(cases.tokens(3), past_key_values=cache).logits, first)


def test_other_attention_with_this_cache_is_refused():
    model = cases.gpt2("sdpa")
    with pytest.raises(ValueError, match="must not be a CosformerCache unless attn_implementation"):
        written(model, cases.tokens(), "greedy", past_key_values=hf.CosformerCache())


def test_keys_that_are_attended_to_twice_are_refused():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
    config = DiffLlamaConfig(**heads, **cases.SMALL)
    model = DiffLlamaForCausalLM._from_config(config, attn_implementation="cosformer-multiscale")
    with pytest.raises(ValueError, match="must not be a CosformerCache for a layer that attends"):
        model(cases.tokens(), past_key_values=hf.CosformerCache())


def test_a_static_cache_is_refused():
    with pytest.raises(
        ValueError, match=r"CosformerCache or a DynamicCache .* length of 18 tokens"
    ):
        written(cases.gpt2("cosformer"), cases.tokens(), "greedy", cache_implementation="static")


def test_assisted_decoding_works_where_tokens_can_be_taken_back_and_is_refused_elsewhere():
    model, x = cases.gpt2("cosformer"), cases.tokens(1, 4).repeat(1, 5)
    alone = written(model, x, "greedy")
    assert torch.equal(written(model, x, "greedy", prompt_lookup_num_tokens=3), alone)
    cache = hf.CosformerCache()
    with pytest.raises(ValueError, match=r"tokens_to_remove must be 0 .* got -"):
        written(model, x, "greedy", prompt_lookup_num_tokens=3, past_key_values=cache)
