"""Models whose layers differ: they are what their pattern says, stream, generate and resume."""

import doctest
from dataclasses import replace

import pytest
import torch
from model_cases import HYBRIDS, config, draw, make
from streaming import in_pieces
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import cosformer.models.pattern
from cosformer.config import build
from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, Sampling, create_model, generate
from cosformer.models.pattern import best_positions, read_pattern


def test_a_pattern_is_repeated_over_the_layers():
    assert read_pattern("softmax", 3) == ("softmax",) * 3
    assert read_pattern("local*2 cosformer", 6) == ("local", "local", "cosformer") * 2
    assert not doctest.testmod(cosformer.models.pattern).failed
    model = create_model(config("windows", layers=6))
    kinds = [type(block.attention.mechanism).__name__ for block in model.backbone.blocks]
    assert kinds == ["Local", "Cosformer", "Cosformer"] * 2
    assert model.backbone.blocks[3].attention.mechanism.reach == 3
    assert model.backbone.blocks[4].attention.mechanism.horizon == 48


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


def test_text_may_go_on_beyond_max_length_where_nothing_ends_with_it():
    for name in ("global", "multiscale", "gated"):  # softmax remembers all of it, cosFormer a sum
        model = make(name)
        assert model.backbone.limit is None
        (found,) = generate(model, [[1, 2]], Sampling(max_new_tokens=100))
        assert len(found) == 100
    assert all(make(name).backbone.shifts for name in HYBRIDS)  # prompts are padded
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


def test_an_encoder_decoder_has_no_convolution_towards_its_source():
    given = {"kind": "encoder-decoder", "conv": 5, "positions": "auto", "layers": 3}
    model = make("softmax cosformer softmax", **given)
    assert all(block.cross.conv is None for block in model.backbone.blocks)
    source, tokens = draw(2, 9), draw(2, 13, seed=2)
    out, _ = in_pieces(model, tokens, [6, 7], model.empty_state(source))
    assert_close(out, model(source, tokens))


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
