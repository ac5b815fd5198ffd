"""Every task is learnt by heart: the loss on two of its batches goes to about zero."""

import pytest

from cosformer.training import Budget, Optimiser, RunConfig, Schedule, TaskConfig
from cosformer.training.config import kind_of
from cosformer.training.evaluation import summed_loss
from cosformer.training.feed import described
from cosformer.training.learner import Learner
from cosformer.training.phases import Phase

STEPS = 200


@pytest.mark.slow
def test_two_batches_of_every_task_are_learnt_by_heart(task, tmp_path):
    shape = {"model": {"layers": 1, "width": 32, "heads": 2}, "log_every": STEPS}
    schedule = Schedule("constant", warmup=0.1)  # the task below is what the fixture has instead
    config = RunConfig(TaskConfig("lm"), tmp_path, schedule=schedule, **shape)
    how = Optimiser(lr=1e-2, weight_decay=0.0), Budget(steps=STEPS, batch=2)
    phase = Phase("training", task, config.model_config(task.facts), *how, is_last=True)
    assert phase.model.kind == kind_of(task.facts)
    learner = Learner(config, phase, 0)
    place = {"seed": 0, "rank": 0, "batch_size": 2}
    batches = [described(task.batch("train", step=n, **place)) for n in range(2)]
    for n in range(STEPS):
        learner.learn(batches[n % 2])
        if n % 10 == 9:
            losses = [summed_loss(learner.model, fed.batch).item() / fed.labels for fed in batches]
            if max(losses) < 0.1:
                return
    pytest.fail(f"the loss is still {max(losses):.2f} after {STEPS} steps")
