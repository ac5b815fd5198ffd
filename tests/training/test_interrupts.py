"""Ctrl-C and readers that leave: all steps are kept, and the run ends as if nothing had been."""

import signal
from dataclasses import replace

import pytest
import training_cases as cases

from cosformer import cli
from cosformer.training import learner, load, train, trainer
from cosformer.training.folder import state_of

pytestmark = pytest.mark.usefixtures("heard")


@pytest.mark.parametrize(("step", "number"), [(1, "SIGINT"), (8, "SIGTERM"), (24, "SIGINT")])
def test_an_interrupt_keeps_every_step(config, step, number, whole, monkeypatch):
    """It comes in the middle of a step, which is ended first; lines and evaluations follow."""
    config = replace(config, save_seconds=1e9)
    with monkeypatch.context() as patch, cli._signals():
        interrupt(patch, step, signal.Signals[number])
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert state_of(config.out)["state"] == "interrupted"
    assert load(config.out, "last").place.step == state_of(config.out)["step"] == step
    train(config)
    cases.assert_same_outcome(config.out, whole)


def test_the_command_saves_and_ends_when_it_is_terminated(tmp_path, monkeypatch, shell):
    monkeypatch.chdir(tmp_path)
    interrupt(monkeypatch, 3, signal.SIGTERM)
    sizes = ("model.layers=2", "model.width=16", "task.options.length=16", "budget.batch=2")
    words = [word for each in sizes for word in ("--set", each)]
    code, _, err = shell("train", "copying", "--device", "cpu", "--out", "r", *words)
    assert (code, "interrupted; the checkpoint of step 3 is in r" in err) == (143, True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for verb in (["evaluate", "r"], ["generate", "r", "--prompt", "a"]):
        assert "take the last one (--checkpoint last)" in shell.refuses(*verb)


def test_an_interrupt_of_an_evaluation_keeps_the_steps(config, tmp_path, monkeypatch):
    config = replace(config, save_seconds=1e9, pretraining=cases.pretraining())
    whole = replace(config, out=tmp_path / "whole")
    train(whole)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "evaluate", lambda *_, **__: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                train(config)
        assert state_of(config.out)["step"] == 8
    train(config)
    cases.assert_same_outcome(config.out, whole.out)


def test_an_interrupt_keeps_nothing_that_is_not_finite(config, monkeypatch):
    cases.poison(monkeypatch, "loss", step=4)
    interrupt(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        train(replace(config, save_seconds=1e9))
    assert not (config.out / "last.safetensors").exists()


def interrupt(monkeypatch, step, number=signal.SIGINT):
    """As Ctrl-C does, between the gradient of this step and the update."""
    clip = learner.Learner._clip

    def interrupted(self):
        if self.step + 1 == step:
            signal.raise_signal(number)
        return clip(self)

    monkeypatch.setattr(learner.Learner, "_clip", interrupted)
