"""The inputs of a task as a task: what follows, what was hidden, from one tower or two."""

import pytest
import torch

from cosformer import tasks
from cosformer.tasks import IGNORED
from cosformer.tasks.pretraining import from_inputs

HERE = {"seed": 1, "rank": 0, "step": 2, "batch_size": 4}


def test_the_next_token_is_asked_for(task):
    inputs = from_inputs(task, "causal", rate=0.15)
    assert (inputs.facts.causal, inputs.facts.asks) == (True, "tokens")
    batch = inputs.batch("train", **HERE)
    tokens, labels = batch["tokens"], batch["labels"]
    asked = labels != IGNORED
    assert asked.any()
    assert not asked[:, -1].any()
    assert torch.equal(labels[:, :-1][asked[:, :-1]], tokens[:, 1:][asked[:, :-1]])
    assert int(labels.max()) < inputs.facts.data_tokens
    real = batch["mask"][:, 1:] & (tokens[:, 1:] < inputs.facts.data_tokens)
    assert torch.equal(asked[:, :-1], real)


def test_both_towers_are_read_for_either_objective(folder):
    task = tasks.create("retrieval", data=folder, length=200)
    pairs = task.batch("train", **HERE)
    inputs = from_inputs(task, "causal", rate=0.15)
    assert inputs.facts.towers == 1
    stacked = inputs.batch("train", **HERE)
    for n, tower in enumerate(("", "2")):
        width = pairs[f"tokens{tower}"].shape[1]
        rows = slice(4 * n, 4 * n + 4)
        assert torch.equal(stacked["tokens"][rows, :width], pairs[f"tokens{tower}"])
        assert torch.equal(stacked["mask"][rows, :width], pairs[f"mask{tower}"])
        assert not stacked["mask"][rows, width:].any()
    masked = from_inputs(task, "masked", rate=0.5).batch("train", **HERE)
    assert masked["tokens"].shape == stacked["tokens"].shape
    with pytest.raises(ValueError, match="objective must be one of masked, causal, got 'guess'"):
        from_inputs(task, "guess", rate=0.1)
