"""What cannot be trained is refused before a folder is made for it."""

from dataclasses import replace

import pytest
import torch
import training_cases as cases

from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, create_model
from cosformer.training import possible, train
from cosformer.training.folder import adopt


@pytest.fixture
def short(config, tmp_path):
    """Texts of up to 4 bytes where 100 are allowed, by a mechanism for 100."""
    lines = [f"{n % 2}\t{'ab'[n % 2] * (1 + n % 4)}" for n in range(40)]
    task = cases.table(tmp_path, lines, 100)
    return replace(config, task=task, model={**config.model, "options": {"horizon": 100}})


def with_model(config, **changes):
    return replace(config, model={**config.model, **changes})


def test_a_mechanism_for_fewer_tokens_is_refused(short):
    for changes in ({"options": {"horizon": 99}}, {"pooling": "cls"}):  # a cls is one more
        with pytest.raises(ValueError, match=r"allow the 10\d tokens of training, got cosformer"):
            train(with_model(short, **changes))
        assert not short.out.exists()
    assert train(short).place.step == 24


def test_a_run_that_is_there_goes_on_as_it_began(short):
    config = with_model(short, options={"horizon": 64})  # no batch is wider
    config.out.mkdir()
    adopt(config)
    assert train(config).place.step == 24


@pytest.mark.parametrize("name", ["cosformer", "performer", "bigbird", "linformer", "reformer"])
def test_no_weights_are_drawn_to_ask(name):
    kind = "decoder" if MECHANISMS[name].traits.causal != "no" else "masked-lm"
    config = ModelConfig(kind=kind, mechanism=name, max_length=32, layers=1, width=8)
    found = possible.outline(config)
    assert all(parameter.is_meta for parameter in found.parameters())
    shapes = {key: tensor.shape for key, tensor in create_model(config).state_dict().items()}
    assert {key: tensor.shape for key, tensor in found.state_dict().items()} == shapes


def test_a_mechanism_may_read_its_numbers(config, monkeypatch):
    class Reading(MECHANISMS["softmax"]):
        def __init__(self, heads, width, *, key_heads=None):
            super().__init__(heads, width, key_heads=key_heads)
            self.number = torch.ones(()).item()

    monkeypatch.setitem(MECHANISMS, "reading", Reading)
    assert train(with_model(config, mechanism="reading")).place.step == 24
