"""Training goes on while a checkpoint is written, and ends when the last one is."""

import json
import threading
from dataclasses import replace

import training_cases as cases

from cosformer.training import Learner, load, train
from cosformer.training.checkpoints import file as checkpoint
from cosformer.training.folder import state_of

PATIENCE = 20
"""Seconds that a write waits for a step that never comes."""


def test_steps_are_taken_while_a_checkpoint_is_written(config, whole, monkeypatch):
    """A write that ends after the next two steps has what the step had that was saved."""
    learn, put, reached, counts = Learner.learn, checkpoint.put, threading.Condition(), [0]

    def learns(self, fed):
        learn(self, fed)
        with reached:
            counts.append(self.step)
            reached.notify()

    def late(path, tensors, about):
        saved = json.loads(about["facts"])["place"]["step"]
        with reached:
            assert reached.wait_for(lambda: counts[-1] >= min(saved + 2, 24), PATIENCE)
        found = {float(x) for name, x in tensors.items() if name.startswith("optimiser.step.")}
        assert found <= {saved}
        put(path, tensors, about)

    monkeypatch.setattr(Learner, "learn", learns)
    monkeypatch.setattr(checkpoint, "put", late)
    train(config)
    cases.assert_same_outcome(config.out, whole)


def test_one_checkpoint_is_written_at_a_time_and_the_last_is_waited_for(config, whole, monkeypatch):
    put, under_way, most = checkpoint.put, [], []

    def counted(path, *content):
        under_way.append(path)
        most.append(len(under_way))
        put(path, *content)
        under_way.pop()

    monkeypatch.setattr(checkpoint, "put", counted)
    train(replace(config, save_seconds=0.0))
    assert set(most) == {1}
    assert len(most) >= 24
    assert state_of(config.out)["state"] == "finished"
    assert load(config.out, "last").place.step == 24
    cases.assert_same_outcome(config.out, whole)
