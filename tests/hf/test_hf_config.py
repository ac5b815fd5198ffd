"""The config of native models: two names for a field, one meaning."""

import dataclasses

import hf_cases as cases
import pytest
from transformers import AutoConfig

import cosformer.hf as hf
from cosformer.models import ModelConfig


def test_defaults_are_those_of_our_models():
    assert hf.CosformerConfig().model_config("decoder") == ModelConfig()


def test_every_field_of_our_config_goes_there_and_back_through_a_folder(tmp_path):
    changed = ModelConfig(
        kind="classifier", vocabulary=99, layers=6, width=48, heads=4, key_heads=2, head_dim=8,
        value_dim=16, hidden=50, mechanism=cases.HYBRID, options={"softmax": {}}, max_length=77,
        positions="auto", conv=3, conv_on="input", gate="sigmoid", norm=True, qk_norm=True,
        glu=True, dropout=0.25, classes=7, pooling="cls",
    )  # fmt: skip
    plain = ModelConfig()
    same = [
        f.name
        for f in dataclasses.fields(plain)
        if getattr(plain, f.name) == getattr(changed, f.name)
    ]
    assert same == ["tied"]  # the only one a classifier must leave
    hf.CosformerConfig.of(changed).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is hf.CosformerConfig
    assert loaded.model_config("classifier") == changed


def test_our_names_are_known_too():
    config = hf.CosformerConfig(width=128, layers=3, heads=8, vocabulary=7, tied=False)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (128, 3, 7)
    assert (config.num_attention_heads, config.tie_word_embeddings, config.width) == (8, False, 128)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mechanism": "cosfromer"}, "mechanism must be one of .*; did you mean 'cosformer'"),
        ({"hidden_size": 65}, "width must be a multiple of heads=2, got 65"),
        ({"max_length": 9}, "max_length is called max_position_embeddings .* got 9"),
        ({"mechanism": "softmax*3"}, "mechanism must be a pattern of at most layers=2"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hf.CosformerConfig(**given)
