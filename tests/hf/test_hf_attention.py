"""`attn_implementation="cosformer"` in models of Transformers': the op's numbers, and refusals."""

import warnings

import hf_cases as cases
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    BloomConfig,
    CodeGenConfig,
    DataCollatorWithFlattening,
    MistralConfig,
    XGLMConfig,
)
from transformers import MistralForCausalLM as Mistral

import cosformer
import cosformer.hf as hf
from cosformer.hf import attention as module

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def own(name, q, k, v, horizon, **given):
    """The op itself, as the name means it."""
    if name == "cosformer":
        return cosformer.attention(q, k, v, horizon=horizon, **given)
    decay = cosformer.multiscale_decays(k.shape[1])
    return cosformer.attention(q, k, v, horizon=65_536, decay=decay, **given)


def seen_by(layer, run):
    """The input of a layer while `run` runs, and its output."""
    found = {}

    def keep(_, args, kwargs, out):
        found["x"] = args[0] if args else kwargs["hidden_states"]
        found["out"] = out[0]

    handle = layer.register_forward_hook(keep, with_kwargs=True)
    run()
    handle.remove()
    return found["x"], found["out"]


@pytest.mark.parametrize("name", cases.NAMES)
def test_gpt2_attends_as_the_op_does(name):
    model, x = cases.gpt2(name), cases.tokens()
    layer = model.transformer.h[0].attn
    inputs, out = seen_by(layer, lambda: model(x))
    q, k, v = (
        part.unflatten(-1, (2, 16)).transpose(1, 2) for part in layer.c_attn(inputs).split(32, -1)
    )
    heads = own(name, q, k, v, 64, causal=True)
    torch.testing.assert_close(out, layer.c_proj(heads.transpose(1, 2).flatten(-2)), **CLOSE)


@pytest.mark.parametrize("name", cases.NAMES)
def test_bert_attends_to_both_sides_as_the_op_does(name):
    model, x = cases.bert(name), cases.tokens()
    layer = model.encoder.layer[0].attention.self
    inputs, out = seen_by(layer, lambda: model(x))
    q, k, v = (
        project(inputs).unflatten(-1, (2, 16)).transpose(1, 2)
        for project in (layer.query, layer.key, layer.value)
    )
    heads = own(name, q, k, v, 512)
    torch.testing.assert_close(out, heads.transpose(1, 2).flatten(-2), **CLOSE)


@pytest.mark.parametrize("name", cases.NAMES)
def test_grouped_heads_get_the_decays_of_their_keys(name):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 2, 9, 8)
    layer = cases.gpt2(name).transformer.h[0].attn
    function = {
        "cosformer": hf.cosformer_attention,
        "cosformer-multiscale": hf.multiscale_attention,
    }
    out, weights = function[name](layer, q, k, v, None, scaling=0.1)
    expected = own(name, q, k, v, 64, causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), **CLOSE)
    assert weights is None


def test_the_horizon_is_the_configs_own_where_it_names_one():
    x = cases.tokens()
    model = cases.gpt2("cosformer")
    before = model(x).logits
    model.config.cosformer_horizon = 13
    assert not torch.allclose(model(x).logits, before, atol=1e-4)
    model.config.cosformer_horizon = 11
    with pytest.raises(ValueError, match=r"horizon must be at least .* 12, got 11"):
        model(x)


@pytest.mark.parametrize("name", cases.NAMES)
def test_a_horizon_of_none_is_none_given(name):
    model, x = cases.gpt2(name), cases.tokens()
    before = model(x).logits
    model.config.cosformer_horizon = None
    assert torch.equal(model(x).logits, before)


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("make", [cases.gpt2, cases.bert, cases.opt])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_leak(name, make, side):
    model, x = make(name), cases.tokens()
    mask = torch.ones_like(x)
    mask[0, slice(4) if side == "left" else slice(8, None)] = 0
    others = torch.where(mask.bool(), x, (x + 1) % cases.VOCABULARY)
    first, second = model(x, attention_mask=mask)[0], model(others, attention_mask=mask)[0]
    torch.testing.assert_close(first[mask.bool()], second[mask.bool()], rtol=0, atol=0)
    looks_there = side == "left" or make is cases.bert  # what is causal sees nothing on its right
    seen = torch.allclose(first[mask.bool()], model(others)[0][mask.bool()], atol=1e-4)
    assert seen != looks_there


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("make", [cases.gpt2, cases.bert])
def test_packed_sequences_are_as_if_each_were_alone(name, make):
    model, x = make(name), cases.tokens(1, 17)
    parts = [x[:, :5], x[:, 5:6], x[:, 6:]]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    packed = collate([{"input_ids": part[0].tolist()} for part in parts])
    packed.pop("labels")
    alone = torch.cat([model(part)[0] for part in parts], 1)
    torch.testing.assert_close(model(**packed)[0], alone, **CLOSE)
    assert not torch.allclose(model(x)[0], alone, atol=1e-4)


def test_packed_sequences_are_known_by_their_positions():
    model, x = cases.gpt2("cosformer"), cases.tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    alone = torch.cat([model(x[:, :4]).logits, model(x[:, 4:]).logits], 1)
    out = model(x, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(out, alone, **CLOSE)
    with pytest.raises(ValueError, match=r"position_ids .* must have a batch of 1 .* got 2"):
        model(x.expand(2, -1), position_ids=positions.expand(2, -1), use_cache=False)


@pytest.mark.parametrize("name", cases.NAMES)
def test_rotated_queries_are_warned_of_once_by_the_models_name(name):
    module._warn_once.cache_clear()
    model, x = cases.llama(name), cases.tokens()
    with pytest.warns(UserWarning, match=f"'{name}' takes queries and keys of llama after they"):
        model(x)
    with warnings.catch_warnings(action="error"):
        model(x)


def test_dropout_of_weights_is_refused_in_training_alone():
    model, x = cases.gpt2("cosformer"), cases.tokens()
    model.transformer.h[1].attn.attn_dropout.p = 0.1
    model(x)
    with pytest.raises(
        ValueError, match=r"dropout of attention weights must be 0 .* got 0\.1: set"
    ):
        model.train()(x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_attentions": True}, "output_attentions must be None .* never formed.* got True"),
        (
            {"attention_mask": torch.ones(2, 7, dtype=torch.int64)},
            r"attention_mask must be \[batch, length\], .* 2 rows of 12 tokens, got \[2, 7\]",
        ),
        (
            {"attention_mask": torch.zeros(2, 1, 12, 12)},
            r"attention_mask must be \[batch, length\], .* got torch.float32 \[2, 1, 12, 12\]",
        ),
        ({"softcap": 30.0}, "softcap must be None .* got 30.0"),
        ({"sliding_window": 4}, "sliding_window must be None .* got 4"),
        ({"position_bias": torch.zeros(1, 2)}, r"position_bias must be None .* got \[1, 2\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, "cu_seq_lens_q and cu_seq_lens_k must be the"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(given, message):
    with pytest.raises(ValueError, match=message):
        cases.gpt2("cosformer")(cases.tokens(), **given)


def test_a_window_is_refused_by_its_name():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 40}
    config = MistralConfig(sliding_window=8, **heads, **cases.SMALL)
    model = Mistral._from_config(config, attn_implementation="cosformer")
    with pytest.raises(ValueError, match=r"sliding_window and attention_chunk_size .* got 8"):
        model(cases.tokens())


def test_cross_attention_is_refused_by_its_name():
    heads = {"num_attention_heads": 2, "intermediate_size": 40}
    config = BertConfig(is_decoder=True, add_cross_attention=True, **heads, **cases.SMALL)
    model = BertModel._from_config(config, attn_implementation="cosformer").eval()
    with pytest.raises(
        ValueError, match=r"not be 'cosformer' for cross attention.* 12 queries and 5"
    ):
        model(cases.tokens(), encoder_hidden_states=torch.randn(2, 5, 32))


def test_cross_attention_of_equal_lengths_is_refused_too():
    sizes = {"d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 100}
    layers = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    model = BartModel(BartConfig(**sizes, **layers, **heads, **cases.NO_TOKENS)).eval()
    model.set_attn_implementation("cosformer")
    x = cases.tokens()
    model.encoder(x)
    with pytest.raises(ValueError, match=r"for cross attention.* BartAttention with 12 queries"):
        model(input_ids=x, decoder_input_ids=x)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(hidden_size=16, n_layer=1, n_head=2),
        CodeGenConfig(n_embd=16, n_layer=1, n_head=4, rotary_dim=2),
        XGLMConfig(d_model=16, ffn_dim=32, num_layers=1, attention_heads=2),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_computes_softmax_itself_is_refused_before_it_sees_the_future(config):
    config.vocab_size = 60
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cosformer")
    with pytest.raises(ValueError, match=r"attn_implementation must not be .* got one of .*Config"):
        model(cases.tokens() % 60)


def test_a_mask_of_pairs_is_refused():
    given = {"batch_size": 2, "q_length": 12, "kv_length": 12}
    padding = torch.ones(2, 12, dtype=torch.bool)
    for more in ({"use_vmap": True}, {"attention_mask": padding}):
        with pytest.raises(ValueError, match=r"or_mask_function, .* must be None with a cosformer"):
            module.attention_mask_for(**given, **more, mask_function=lambda b, h, i, j: i >= j)
    with pytest.raises(ValueError, match="the mask must let no token see the next one"):
        module.attention_mask_for(**given, mask_function=lambda b, h, i, j: (i >= j) | (j < 3))


def test_a_model_without_positions_must_be_told_its_horizon():
    layer = torch.nn.Identity()
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"config\.cosformer_horizon must be given"):
        hf.cosformer_attention(layer, q, q, q, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "backend"),
    [
        ("cosformer", cases.gpt2, "inductor"),  # whose code takes a minute to make
        ("cosformer-multiscale", cases.bert, "aot_eager"),
        ("cosformer-multiscale", cases.llama, "aot_eager"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*rotated by their positions")
def test_a_compiled_model_gives_the_same_numbers(name, make, backend):
    torch._dynamo.reset()
    model, x = make(name), cases.tokens()
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    whole = {} if make is cases.bert else {"use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for given in ({}, {"attention_mask": mask}):
        out, expected = compiled(x, **given, **whole)[0], model(x, **given, **whole)[0]
        real = given.get("attention_mask", torch.ones_like(x)).bool()
        torch.testing.assert_close(out[real], expected[real], **CLOSE)


@pytest.mark.slow
def test_a_graph_refuses_packed_sequences_without_their_boundaries():
    torch._dynamo.reset()
    model, x = cases.gpt2("cosformer"), cases.tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="cu_seq_lens_q must be given for packed sequences"):
        compiled(x, position_ids=positions, use_cache=False)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    given = {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    out = compiled(x, **given, use_cache=False).logits
    alone = torch.cat([model(x[:, :4]).logits, model(x[:, 4:]).logits], 1)
    torch.testing.assert_close(out, alone, **CLOSE)
