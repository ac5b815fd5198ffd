"""Replayed steps on a GPU: they learn what steps one by one do."""

import itertools

import pytest
import torch
from training_cases import config, log, pretraining

from cosformer.training import Budget, Trainer, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """Of graphs; a test in which there were none has shown nothing."""
    replay, found = torch.cuda.CUDAGraph.replay, []

    def counted(self):
        found.append(1)
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    yield found
    assert len(found) > 8


def losses(out):
    return [row["loss"] for row in log(out) if "loss" in row]


@pytest.mark.parametrize("mechanism", ["cosformer", "softmax"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_losses_are_those_of_steps_one_by_one(mechanism, precision, tmp_path):
    model = {"layers": 1, "width": 32, "heads": 2, "dropout": 0.1, "mechanism": mechanism}
    given = {"device": "cuda", "precision": precision, "model": model}
    given["budget"] = Budget(steps=24, batch=8, accumulate=2)
    for graph in (False, True):
        train(config(tmp_path / f"{graph}", graph=graph, **given))
    one_by_one, replayed = (losses(tmp_path / f"{graph}") for graph in (False, True))
    assert len(one_by_one) == 8
    assert replayed == pytest.approx(one_by_one, rel=1e-2 if precision == "bfloat16" else 1e-3)
    assert replayed != [replayed[0]] * 8


def test_an_interrupted_run_goes_on_in_both_phases(tmp_path):
    given = {"device": "cuda", "graph": True, "pretraining": pretraining()}
    train(config(tmp_path / "whole", **given))
    broken = config(tmp_path / "broken", save_seconds=0.0, **given)
    for events in (3, 9):
        stopped = Trainer(broken).events()
        list(itertools.islice(stopped, events))
        stopped.close()
    train(broken)
    assert losses(tmp_path / "broken") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
