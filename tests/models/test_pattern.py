"""Models whose layers differ: they are what their pattern says, stream, generate and resume."""

import doctest
import json
from dataclasses import replace

import pytest
import torch
from model_cases import VOCABULARY, draw, pad
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import cosformer.models.pattern
from cosformer.config import build, plain
from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, Sampling, create_model, generate
from cosformer.models.pattern import best_positions, read_pattern

MULTISCALE = {"decay": "multiscale", "horizon": float("inf")}
DRESSED = {"conv": 4, "gate": "sigmoid", "qk_norm": True, "head_dim": 6, "value_dim": 10}
HYBRIDS = {
    "global": {"mechanism": "cosformer*2 softmax", "options": {"cosformer": MULTISCALE}},
    "multiscale": {"mechanism": "cosformer-multiscale*2 softmax", "conv": 4},
    "gated": {"mechanism": "cosformer-gated*2 local", "options": {"local": {"window": 6}}},
    "windows": {"mechanism": "local cosformer*2", "options": {"local": {"window": 6}}},
    "gates": {"mechanism": "gated-delta softmax", "layers": 4, **DRESSED},
    "dressed": {"mechanism": "cosformer softmax cosformer", **DRESSED},
    "on input": {"mechanism": "cosformer softmax cosformer", **DRESSED, "conv_on": "input"},
    "positions": {"mechanism": "linear softmax local", "positions": "learned"},
}


def config(name, **arguments):
    given = {"vocabulary": VOCABULARY, "width": 16, "layers": 3, "max_length": 48}
    return ModelConfig(**{**given, "positions": "auto", **HYBRIDS[name], **arguments})


def make(name, **arguments):
    """In float64, in evaluation mode, its weights large enough for tokens to matter."""
    torch.manual_seed(0)
    model = create_model(config(name, **arguments)).double().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter += (1 if "embedding" in key else 0.2) * torch.randn_like(parameter)
    return model


def test_a_pattern_is_repeated_over_the_layers():
    assert read_pattern("softmax", 3) == ("softmax",) * 3
    assert read_pattern("local*2 cosformer", 6) == ("local", "local", "cosformer") * 2
    assert not doctest.testmod(cosformer.models.pattern).failed
    model = create_model(config("windows", layers=6))
    kinds = [type(block.attention.mechanism).__name__ for block in model.backbone.blocks]
    assert kinds == ["Local", "Cosformer", "Cosformer"] * 2
    assert model.backbone.blocks[3].attention.mechanism.reach == 3
    assert model.backbone.blocks[4].attention.mechanism.horizon == 48


BAD = [
    ({"mechanism": "cosformer*5 softmax"}, ValueError, "at most layers=4 layers, got 'cosf.*raise"),
    ({"mechanism": "cosformer*2 softmax"}, ValueError, "3 layers divide layers=4, .* the other 1 "),
    ({"mechanism": "cosformer*0 softmax"}, ValueError, r"NAME\*COUNT with a .* got 'cosformer\*0'"),
    ({"mechanism": "cosformer*x"}, ValueError, r"NAME\*COUNT with a count .* got 'cosformer\*x'"),
    ({"mechanism": "softmax*999999999999"}, ValueError, "at most layers=4 layers"),
    ({"mechanism": "cosformer sofmax"}, ValueError, "must be one of .*, got 'sofmax'; did you"),
    ({"mechanism": ""}, ValueError, "mechanism must be one of .*, got ''"),
    ({"mechanism": 3}, TypeError, "mechanism must be a string, got int"),
    (
        {"mechanism": "cosformer softmax", "options": {"horizon": 9}},
        ValueError,
        r'options must be by name .*, as {"cosformer": {…}, "softmax": {…}}, got horizon=9',
    ),
    ({"mechanism": "local softmax", "options": {"delta": {}}}, ValueError, "by name .*got delta="),
    ({"conv": 1.5}, TypeError, "conv must be a whole number from 0 on, got 1.5"),
    ({"conv_on": "x"}, ValueError, "conv_on must be one of input, qkv, got 'x'"),
    ({"gate": "x"}, ValueError, "gate must be one of silu, sigmoid, got 'x'"),
    ({"norm": 1}, TypeError, "norm must be a bool, got int"),
    ({"qk_norm": None}, TypeError, "qk_norm must be a bool, got NoneType"),
    ({"head_dim": 0}, ValueError, "head_dim must be a whole number from 1 on, got 0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_configs_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ModelConfig(layers=4, **arguments)


IMPOSSIBLE = [
    ({"mechanism": "softmax linformer"}, "linformer cannot attend causally"),
    ({"mechanism": "softmax delta", "kind": "masked-lm"}, "delta cannot attend without causal"),
    ({"kind": "masked-lm", "conv": 4}, "conv must be odd without causal=True, .* got 4: make it 5"),
]


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE)
def test_what_a_layer_cannot_do_is_refused_when_the_model_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        create_model(ModelConfig(**arguments))


WANTED = {
    "softmax": ("rotary", "rotary"),
    "local": ("rotary", "rotary"),
    "sparse-strided": ("rotary", "rotary"),
    "cosformer": ("none", "learned"),
    "gated-delta": ("none", "learned"),
    "retention": ("none", "learned"),
    "spe": ("none", "none"),
    "linear": ("learned", "learned"),
    "performer": ("learned", "learned"),
    "synthesizer": ("learned", "learned"),
    "linformer": ("learned", "learned"),
}
"""A mechanism -> the positions that it wants in a decoder and in an encoder."""


@pytest.mark.parametrize("name", WANTED)
def test_auto_gives_each_mechanism_the_positions_it_wants(name):
    traits = MECHANISMS[name].traits
    found = tuple(best_positions(traits, causal=causal, conv=False) for causal in (True, False))
    assert found == WANTED[name]


def test_a_convolution_tells_an_encoder_left_from_right():
    for conv, learns in ((0, True), (5, False)):
        model = create_model(config("windows", kind="masked-lm", conv=conv))
        assert (model.backbone.positions is not None) is learns
    assert config("global").position_schemes(causal=True) == {
        "cosformer": "none",
        "softmax": "rotary",
    }
    turned = [block.attention.positions is not None for block in make("global").backbone.blocks]
    assert turned == [False, False, True]


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_pieces_and_steps_of_a_stream_are_the_full_pass(name):
    model, tokens = make(name), draw(2, 20)
    state, outs = model.empty_state(2), []
    for piece in tokens.split([7, 1, 1, 10, 1], 1):
        out, state = (model.step if piece.shape[1] == 1 else model.stream)(piece, state)
        outs.append(out)
    assert_close(torch.cat(outs, 1), model(tokens))


BOTH_WAYS = [name for name in HYBRIDS if name != "gates"]  # the delta rule is causal
POSSIBLE = [*((name, "decoder") for name in HYBRIDS), *((name, "masked-lm") for name in BOTH_WAYS)]


@pytest.mark.parametrize("side", ["left", "right", "between"])
@pytest.mark.parametrize(("name", "kind"), POSSIBLE)
def test_padding_changes_nothing(name, kind, side):
    odd = {"conv": 5} if kind == "masked-lm" and "conv" in HYBRIDS[name] else {}
    model, tokens = make(name, kind=kind, **odd), draw(2, 13)
    padded, mask = pad(tokens, side)
    assert_close(model(padded, mask)[mask].view(2, 13, -1), model(tokens))


@pytest.mark.parametrize("name", HYBRIDS)
def test_prompts_together_get_what_each_gets_by_full_passes(name):
    model, prompts = make(name, tied=False), [[3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8], [9]]
    assert model.backbone.shifts  # so that prompts of all lengths are read together
    found = generate(model, prompts, Sampling(max_new_tokens=7, temperature=0))
    for prompt, tokens in zip(prompts, found, strict=True):
        for n, token in enumerate(tokens):
            assert model(torch.tensor([[*prompt, *tokens[:n]]]))[0, -1].argmax() == token


def test_text_may_go_on_beyond_max_length_where_nothing_ends_with_it():
    for name in ("global", "multiscale", "gated"):  # softmax remembers all of it, cosFormer a sum
        model = make(name)
        assert model.backbone.limit is None
        (found,) = generate(model, [[1, 2]], Sampling(max_new_tokens=100))
        assert len(found) == 100
    assert make("windows").backbone.limit == 48  # the horizon
    assert make("positions").backbone.limit == 48  # a table of positions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_the_memory_of_a_stream_is_told_by_what_needs_it(name, dtype):
    model = make(name).to(dtype)
    _, state = model.stream(draw(1, 20))
    held = dict.fromkeys(model.config.mechanisms, 0)
    for mechanism, layer in zip(model.config.mechanisms, state.layers, strict=True):
        tensors = [x for x in tree_leaves(layer.mechanism) if isinstance(x, torch.Tensor)]
        held[mechanism] += sum(x.nbytes for x in tensors if x.is_floating_point())
        if layer.conv is not None:
            held["conv"] = held.get("conv", 0) + layer.conv.nbytes
    assert model.stream_memory(20) == pytest.approx(held, rel=0.02)  # γ is a float64


def test_every_parameter_gets_a_gradient():
    model = create_model(config("dressed")).double()
    out = model(draw(4, 20))
    (out * torch.randn_like(out)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("name", HYBRIDS)
def test_config_and_weights_go_there_and_back(name):
    model = make(name)
    again = build(ModelConfig, json.loads(json.dumps(plain(model.config))))
    assert again == model.config
    other = create_model(again).double().eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(draw(2, 9)), model(draw(2, 9)))


def test_an_encoder_decoder_has_no_convolution_towards_its_source():
    given = {"kind": "encoder-decoder", "conv": 5, "mechanism": "softmax cosformer softmax"}
    model = make("global", **given, options={})
    assert all(block.cross.conv is None for block in model.backbone.blocks)
    source, tokens = draw(2, 9), draw(2, 13, seed=2)
    first, state = model.stream(tokens[:, :6], model.empty_state(source))
    second, _ = model.stream(tokens[:, 6:], state)
    assert_close(torch.cat([first, second], 1), model(source, tokens))


def test_cross_attention_follows_the_mechanism_of_its_layer():
    options = {"cosformer-multiscale": {"horizon": 99}}
    model = make("multiscale", kind="encoder-decoder", conv=5, options=options)
    kinds = [type(block.cross.mechanism).__name__ for block in model.backbone.blocks]
    assert kinds == ["Cosformer", "Cosformer", "Softmax"]
    assert model.backbone.blocks[0].cross.mechanism.horizon == 99


def test_configs_from_before_these_fields_mean_what_they_meant():
    """A run's config names only what differs from its preset: defaults must not move."""
    old = build(ModelConfig, {"layers": 2, "width": 16, "options": {"horizon": 64}})
    names = set(create_model(old).state_dict())
    assert "backbone.positions.weight" in names
    assert not any(part in name for name in names for part in ("conv", "gate", "attention.norm"))
    assert replace(old, mechanism="softmax", options={}).position_schemes(causal=True) == {
        "softmax": "learned"
    }
