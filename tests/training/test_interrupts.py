"""Ctrl-C and readers that leave: all steps are kept, and the run ends as if nothing had been."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training_cases as cases

from cosformer.training import RunConfig, Started, Trainer, learner, load, train, trainer
from cosformer.training.folder import state_of


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell's jobs in the background are deaf to Ctrl-C, and so would be their tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", [1, 6, 8, 13, 24])
def test_an_interrupt_keeps_every_step(
    config: RunConfig, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the middle of a step, which is ended first; lines and evaluations follow."""
    config = replace(config, save_seconds=1e9)
    interrupt(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    assert state_of(config.out)["state"] == "interrupted"
    assert load(config.out, "last").place.step == state_of(config.out)["step"] == step
    train(config)
    whole = cases.config(tmp_path / "whole")
    train(whole)
    cases.assert_same_outcome(config.out, whole.out)


def test_an_interrupt_of_an_evaluation_keeps_the_steps(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, save_seconds=1e9, pretraining=cases.pretraining())
    whole = replace(config, out=tmp_path / "whole")
    train(whole)

    def interrupted(*_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "evaluate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(config)
        assert state_of(config.out)["step"] == 8
    train(config)
    cases.assert_same_outcome(config.out, whole.out)


def test_an_interrupt_keeps_nothing_that_is_not_finite(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.poison(monkeypatch, "loss", step=4)
    interrupt(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        train(replace(config, save_seconds=1e9))
    assert not (config.out / "last.safetensors").exists()


def interrupt(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """As Ctrl-C does, between the gradient of this step and the update."""
    clip = learner.Learner._clip

    def interrupted(self: learner.Learner) -> list[torch.Tensor]:
        if self.step + 1 == step:
            signal.raise_signal(signal.SIGINT)
        return clip(self)

    monkeypatch.setattr(learner.Learner, "_clip", interrupted)


def test_a_reader_that_leaves_loses_no_step(config: RunConfig, tmp_path: Path) -> None:
    config = replace(config, save_seconds=1e9)
    for step, pending in ((12, False), (16, False), (24, True), (24, False)):
        with contextlib.closing(Trainer(config).events()) as events:
            for event in events:
                if event.step == step and not isinstance(event, Started):
                    break
        place = load(config.out, "last").place
        assert (place.step, place.pending) == (step, pending)
    train(config)
    whole = cases.config(tmp_path / "whole")
    train(whole)
    cases.assert_same_outcome(config.out, whole.out)
