"""Pre-training on the task's own inputs, then the task, as one run."""

from dataclasses import replace

import pytest
import torch
import training_cases as cases

from cosformer.training import Budget, Evaluated, Pretraining, Started, Trainer, load, train
from cosformer.training.learner import Learner
from cosformer.training.phases import phases


@pytest.fixture
def table(tmp_path):
    """Which of two letters a text has."""
    return cases.table(tmp_path, [f"{n % 2}\t{'ab'[n % 2] * (1 + n % 20)}" for n in range(200)], 20)


@pytest.mark.parametrize(("objective", "pooling"), [("masked", "mean"), ("causal", "cls")])
def test_both_phases_are_one_run(config, table, objective, pooling):
    before = replace(cases.pretraining(), objective=objective)
    model = {**config.model, "pooling": pooling}
    config = replace(config, task=table, pretraining=before, model=model)
    events = list(Trainer(config).events())
    kinds = [event.model.kind for event in events if isinstance(event, Started)]
    assert kinds == ["masked-lm" if objective == "masked" else "decoder", "classifier"]
    judged = [(e.phase, e.step) for e in events if isinstance(e, Evaluated)]
    steps = {"pretraining": (8, 10), "training": (8, 16, 24)}
    assert judged == [(phase, step) for phase in steps for step in steps[phase]]
    loaded = load(config.out)
    assert (loaded.model.config.kind, loaded.place.metric) == ("classifier", "accuracy")


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_pre_training_on_a_probe_learns_from_all_its_labels(config, objective):
    """A probe asks for few tokens of a sample, and its loss looks at no others."""
    config = replace(config, pretraining=replace(cases.pretraining(), objective=objective))
    first, second = phases(config, config.task.create("cpu"))
    assert (first.task.facts.asked, second.task.facts.asked) == (None, 3)


@pytest.mark.parametrize("average", [None, 0.9])
def test_the_task_begins_with_the_backbone_that_was_learnt(config, table, average):
    config = replace(config, task=table, pretraining=cases.pretraining(), average=average)
    first, second = phases(config, table.create("cpu"))
    before, after = Learner(config, first, 0), Learner(config, second, 1)
    with torch.no_grad():
        for parameter in before.model.parameters():
            parameter.add_(1.0)
    after.begin_from(before.model)
    learnt = before.model.get_submodule("backbone").state_dict()
    for model in (after.model, after.judged):
        found = model.get_submodule("backbone").state_dict()
        assert found.keys() == learnt.keys()
        assert all(torch.equal(found[name], learnt[name]) for name in learnt)


STOPS = [("pretraining", 6, False), ("pretraining", 10, True), ("training", 3, False)]
STOPS += [("training", 16, False), ("training", 24, True), ("training", 24, False)]
"""Phase and step at which a reader leaves, and whether the model is still to be judged then."""


def test_a_reader_that_leaves_loses_no_step_and_a_run_goes_on_in_either_phase(config, tmp_path):
    config = replace(config, pretraining=cases.pretraining(), save_seconds=1e9)
    whole = replace(config, out=tmp_path / "whole")
    train(whole)
    for phase, step, pending in STOPS:
        for event in Trainer(config).events():
            if (event.phase, event.step) == (phase, step) and not isinstance(event, Started):
                break
        place = load(config.out, "last").place
        assert (place.step, place.pending) == (step, pending)
    train(config)
    cases.assert_same_outcome(config.out, whole.out)


def test_both_phases_have_a_budget_and_a_rate_of_their_own(config):
    before = Pretraining("causal", budget=Budget(steps=5, batch=2), lr=0.5)
    first, second = phases(replace(config, pretraining=before), config.task.create("cpu"))
    assert (first.budget, first.optimiser.lr) == (before.budget, 0.5)
    assert (second.budget, second.optimiser) == (config.budget, config.optimiser)
    assert (first.is_last, second.is_last) == (False, True)
