"""Configs, presets and what is refused, each by name, rule and value."""

from pathlib import Path

import pytest
import torch
from model_cases import config, draw, make

from cosformer.mechanisms import MECHANISMS
from cosformer.models import (
    PARAMETERS,
    PRESETS,
    Classifier,
    LanguageModel,
    ModelConfig,
    create_model,
    parameter_count,
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_they_and_the_page_state(name):
    with torch.device("meta"):
        assert parameter_count(create_model(PRESETS[name])) == PARAMETERS[name]
    given = PRESETS[name]
    numbers = (given.layers, given.width, given.heads, given.vocabulary, PARAMETERS[name])
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert " | ".join([f"| `{name}`", *(f"{n:,}" for n in numbers)]) + " |" in page


def test_a_gated_feed_forward_has_about_as_many_parameters():
    plain, gated = (
        parameter_count(create_model(config(width=192, glu=glu))) for glu in (False, True)
    )
    assert abs(gated / plain - 1) < 0.02


def test_limits_of_mechanisms_follow_max_length_unless_given():
    assert make("cosformer").backbone.limit == 48
    assert make("synthesizer", positions="none").backbone.limit == 48
    assert make("softmax", positions="none").backbone.limit is None
    own = ModelConfig(max_length=48, positions="none", options={"horizon": 99})
    assert create_model(own).backbone.limit == 99
    cls = create_model(config(kind="classifier", pooling="cls"))
    assert cls(draw(1, 48)).shape == (1, 5)  # the cls token stands beside the 48


BAD = [
    ({"kind": "gpt"}, ValueError, "kind must be one of decoder, masked-lm, .*, got 'gpt'"),
    ({"mechanism": "sofmax"}, ValueError, "mechanism must be one of cosformer, .*, got 'sofmax'"),
    ({"positions": "alibi"}, ValueError, "positions must be one of none, .*, got 'alibi'"),
    ({"layers": 0}, ValueError, "layers must be a whole number from 1 on, got 0"),
    ({"heads": 2.0}, TypeError, r"heads must be a whole number from 1 on, got 2\.0"),
    ({"width": 30, "heads": 4}, ValueError, "width must be a multiple of heads=4, got 30"),
    ({"heads": 4, "key_heads": 3}, ValueError, "key_heads must divide heads=4, got 3"),
    ({"dropout": 1.5}, ValueError, r"dropout must lie in 0 ... 1, got 1.5"),
    ({"glu": 1}, TypeError, "glu must be a bool, got int"),
    ({"options": 3}, TypeError, "options must be a mapping, got int"),
    ({"classes": 3}, ValueError, "classes must be None for kind='decoder', got 3"),
    ({"kind": "pairs"}, ValueError, "classes must be given for kind='pairs', got None"),
    ({"pooling": "cls"}, ValueError, "pooling must be left as 'mean' for kind='decoder'"),
    ({"kind": "pairs", "classes": 2, "tied": False}, ValueError, "tied must be left as True for"),
    ({"mechanism": "cosformer*5 softmax"}, ValueError, "at most layers=4 layers, got 'cosf.*raise"),
    ({"mechanism": "cosformer*2 softmax"}, ValueError, "3 layers divide layers=4, .* name all 4 "),
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
    ({"options": {"cosformer": {}, "eps": 1e-6}}, ValueError, "by name .*got eps="),
    ({"mechanism": "cosformer * 5"}, ValueError, "NAME\\*COUNT without blanks, got"),
    ({"mechanism": "local softmax", "options": {"delta": {}}}, ValueError, "by name .*got delta="),
    ({"conv": 1.5}, TypeError, "conv must be a whole number from 0 on, got 1.5"),
    ({"conv_on": "x"}, ValueError, "conv_on must be one of input, qkv, got 'x'"),
    ({"conv_on": "input"}, ValueError, "conv_on must be left as 'qkv' with conv=0, got 'input'"),
    ({"options": {1: 2}}, TypeError, "options must be a mapping from strings, got the key 1"),
    ({"gate": "x"}, ValueError, "gate must be one of silu, sigmoid, got 'x'"),
    ({"norm": 1}, TypeError, "norm must be a bool, got int"),
    ({"qk_norm": None}, TypeError, "qk_norm must be a bool, got NoneType"),
    ({"head_dim": 0}, ValueError, "head_dim must be a whole number from 1 on, got 0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_configs_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ModelConfig(**{"layers": 4, **arguments})


IMPOSSIBLE = [
    ({"mechanism": "linformer"}, "linformer cannot attend causally.*the nearest that can is"),
    ({"mechanism": "delta", "kind": "masked-lm"}, "delta cannot attend without causal=True"),
    ({"mechanism": "sinkhorn", "kind": "encoder-decoder"}, "sinkhorn cannot attend from one seq"),
    ({"options": {"colour": 1}}, "options of cosformer are .*, got colour"),
    ({"mechanism": "softmax linformer"}, "linformer cannot attend causally"),
    ({"mechanism": "softmax delta", "kind": "masked-lm"}, "delta cannot attend without causal"),
    ({"kind": "masked-lm", "conv": 4}, "conv must be odd without causal=True, .* got 4: make it 5"),
]


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE)
def test_what_a_mechanism_cannot_do_is_refused_when_the_model_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        create_model(ModelConfig(**arguments))
    with pytest.raises(TypeError, match="config must be a ModelConfig, got dict"):
        create_model(arguments)


def test_a_class_of_models_takes_configs_of_its_kinds():
    config = ModelConfig(kind="classifier", classes=2)
    for kind, given, message in (
        (LanguageModel, config, "kind must be one that gives tokens, got 'classifier'"),
        (Classifier, ModelConfig(), "kind must be one that gives classes, got 'decoder'"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(given)


def test_options_of_one_mechanism_may_be_by_its_name():
    named = ModelConfig(options={"cosformer": {"horizon": 99}}).mechanism_options
    assert named == ModelConfig(options={"horizon": 99}).mechanism_options


ACROSS = [
    ("cosformer", {"decay": "multiscale", "eps": 1e-4}, {"horizon": 1024, "eps": 1e-4}),
    ("cosformer-multiscale", {"decay": 0.5, "horizon": 99}, {"horizon": 99}),
    ("cosformer-multiscale", {"learned": True}, {"horizon": 1024}),
    ("cosformer-gated", {"horizon": float("inf")}, {"horizon": float("inf")}),
]


@pytest.mark.parametrize(("name", "options", "across"), ACROSS)
def test_cross_attention_of_a_model_with_a_decay_is_cosformer_without_it(name, options, across):
    config = ModelConfig(kind="encoder-decoder", mechanism=name, options=options)
    for block in create_model(config).backbone.blocks:
        assert block.cross.mechanism.decay is None
        assert type(block.cross.mechanism) is MECHANISMS["cosformer"]
        assert type(block.attention.mechanism) is MECHANISMS[name]
        for option, value in across.items():
            assert getattr(block.cross.mechanism, option) == value


def test_bad_tokens_are_named():
    model, pairs, both = make(), make(kind="pairs"), make(kind="encoder-decoder")
    two, mask = draw(2, 3), torch.ones(2, 4, dtype=torch.bool)
    masked, over, under = make(kind="masked-lm"), torch.tensor([[0, 23]]), torch.tensor([[-1, 0]])
    for call, message in (
        (lambda: model(torch.zeros(2, 3)), r"tokens must be int64 \[batch, length\], .* got .*fl"),
        (lambda: model(over), "tokens must .* below the vocabulary of 23, got 23"),
        (lambda: masked(under), "tokens must .* below the vocabulary of 23, got -1"),
        (lambda: model(two, mask), r"key_mask must be bool \[2, 3\], as tokens"),
        (lambda: model(draw(1, 49)), "length must be at most max_length=48, got 49"),
        (lambda: make(positions="none")(draw(1, 49)), "cannot attend over 49 tokens"),
        (lambda: pairs(two, draw(1, 3)), "second must have the batch of first, 2, got 1"),
        (lambda: both(two, two, mask), r"key_mask must be bool \[2, 3\], as source"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
