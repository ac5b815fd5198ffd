"""A state holds all that the next step depends on, whatever the mechanism draws or keeps."""

import pytest
import torch
import training_cases as cases

from cosformer.mechanisms import MECHANISMS, Seeded
from cosformer.tasks import create
from cosformer.tasks.pretraining import from_inputs
from cosformer.training.checkpoints import Checkpoint, read, write
from cosformer.training.feed import described
from cosformer.training.learner import Learner
from cosformer.training.phases import Phase

TASK = create("copying", length=12, copied=4, vocabulary=6)


def learner(given, tmp_path, seed):
    """Of masked tokens where the mechanism looks both ways, else of the next one."""
    names = [part.partition("*")[0] for part in given["mechanism"].split()]
    objective = "masked" if all(MECHANISMS[name].traits.full for name in names) else "causal"
    task = from_inputs(TASK, objective, rate=0.5)
    config = cases.config(tmp_path, seed=seed, model=given)
    model = config.model_config(task.facts)
    phase = Phase("training", task, model, config.optimiser, config.budget, is_last=True)
    return Learner(config, phase, 0)


DRAWING = ("cosformer", "performer", "rfa-gated", "spe", "bigbird", "reformer", "gated-delta")
"""Mechanisms that draw numbers or project controls, and one that does neither."""
HYBRID = {"mechanism": "cosformer*2 softmax", "layers": 3, "positions": "auto", "width": 16}
HYBRID |= {"options": {"cosformer": {"decay": "multiscale"}}, "conv": 5, "gate": "sigmoid"}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MECHANISMS if name not in DRAWING]


@pytest.mark.parametrize("name", [*DRAWING, *OTHERS])
def test_the_next_step_is_the_same_from_a_checkpoint(name, tmp_path):
    assert_the_same_next_step(tmp_path, {"mechanism": name, "width": 16})


@pytest.mark.parametrize("norm", [False, True])
def test_the_next_step_of_a_model_whose_layers_differ_is_the_same(norm, tmp_path):
    assert_the_same_next_step(tmp_path, {**HYBRID, "norm": norm, "qk_norm": norm})


def assert_the_same_next_step(tmp_path, given):
    first, second = (learner(given, tmp_path, seed) for seed in (0, 1))
    at = {"seed": 0, "rank": 0, "batch_size": 4}
    *before, last = (described(first.phase.task.batch("train", step=n, **at)) for n in range(3))
    for module in (*first.model.modules(), *first.average.modules()):
        if isinstance(module, Seeded):
            module.redraw(torch.Generator().manual_seed(9))
    for fed in before:
        first.learn(fed)
    path = tmp_path / "x.safetensors"
    write(path, Checkpoint(first.tensors(), {}))
    second.config = first.config  # another start, the same draws
    second.restore(read(path), 2, "here")
    for each in (first, second):
        each.learn(last)
    one, other = first.tensors(), second.tensors()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
