"""A run that gets more steps than it was begun with, finished or not."""

import contextlib
import itertools
import json
from dataclasses import replace

import pytest
import training_cases as cases

from cosformer import training
from cosformer.training import Progress, Trainer, load, train
from cosformer.training.folder import load_config, state_of


def longer(config, steps, **changes):
    return replace(config, budget=replace(config.budget, steps=steps), **changes)


def stop_after(config, lines):
    """Train until the log has so many lines of progress more."""
    with contextlib.closing(Trainer(config).events()) as events:
        progress = (event for event in events if isinstance(event, Progress))
        next(itertools.islice(progress, lines - 1, None))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A run of 40 steps after one of 22, as if that had been planned. No log line is due at 22."""
    out = tmp_path_factory.mktemp("planned") / "run"
    train(longer(cases.config(out), 40, extended=(22,)))
    return out


def test_an_extended_run_is_the_run_that_was_planned_so_bit_for_bit(config, planned):
    train(longer(config, 22))
    result = train(longer(config, 40))
    assert (result.place.step, load_config(config.out).extended) == (40, (22,))
    cases.assert_same_outcome(config.out, planned)


@pytest.mark.parametrize("lines", [1, 9])
def test_when_a_run_is_extended_and_stopped_makes_no_difference(config, planned, lines):
    """Stopped before its first end, or after it, and extended then."""
    stop_after(longer(config, 22), 3)
    stop_after(longer(config, 40), lines)
    train(longer(config, 40))
    cases.assert_same_outcome(config.out, planned)


def test_the_rate_of_a_step_is_that_of_the_run_that_the_step_was_begun_for(planned):
    schedule, lr = cases.config(planned).schedule, cases.config(planned).optimiser.lr
    rows = [row for row in cases.log(planned) if "lr" in row]
    assert [row["step"] for row in rows] == [*range(3, 22, 3), 22, *range(24, 40, 3), 40]
    for row in rows:
        steps = 22 if row["step"] <= 22 else 40
        assert row["steps"] == steps
        assert row["lr"] == pytest.approx(lr * schedule.rate(row["step"] - 1, steps))
    assert [row["step"] for row in cases.log(planned) if "metrics" in row] == [
        8,
        16,
        22,
        24,
        32,
        40,
    ]


def test_with_a_constant_rate_an_extended_run_has_the_weights_of_a_whole_one(config, tmp_path):
    constant = {"schedule": training.Schedule("constant", warmup=0)}
    for steps in (10, 16, 24):
        train(longer(config, steps, **constant))
    whole = replace(config, out=tmp_path / "whole", **constant)
    train(whole)
    assert load_config(config.out).extended == (10, 16)
    left, right = (cases.tensors(each.out / "last.safetensors") for each in (config, whole))
    assert all(left[name].equal(right[name]) for name in left.keys() | right.keys())


def test_pretraining_is_not_repeated(config):
    config = replace(config, pretraining=cases.pretraining())
    train(longer(config, 8))
    train(longer(config, 16))
    steps = [row["step"] for row in cases.log(config.out) if row["phase"] == "pretraining"]
    assert steps.count(10) == 2  # a line of progress and one of the evaluation
    assert load(config.out).config.pretraining == config.pretraining


def test_fewer_steps_are_refused_by_both_numbers_and_change_nothing(finished):
    before = {path: path.read_bytes() for path in finished.out.iterdir()}
    with pytest.raises(ValueError, match=r"must be at least the 24 of the run in .*, got 12: it "):
        train(longer(finished, 12))
    assert before == {path: path.read_bytes() for path in finished.out.iterdir()}


def test_a_run_that_is_longer_and_differs_elsewhere_is_another_run(finished):
    with pytest.raises(ValueError, match="out must be a new folder or that of the same run"):
        train(longer(finished, 48, seed=1))
    assert state_of(finished.out)["step"] == 24


@pytest.mark.parametrize("extended", [(24,), (30,), (8, 8), (0,), (9, 4)])
def test_ends_must_rise(config, extended):
    rule = rf"\(--steps\) must be above {extended[-1]}, the steps that .* got 24$"
    with pytest.raises(ValueError, match=rule if extended[-1] > 9 else "that rise from 1 on, got"):
        replace(config, extended=extended)


def test_a_run_on_other_data_is_left_as_it_was(finished):
    path, config = finished.out / "data.json", (finished.out / "config.json").read_bytes()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"content": "other"}))
    with pytest.raises(
        ValueError, match=r"data must be those that the run in .* with other contents"
    ):
        train(longer(finished, 48))
    assert (finished.out / "config.json").read_bytes() == config
