"""What a run does one after the other: pre-training on the task's inputs, then the task."""

from dataclasses import dataclass, replace

from cosformer.models import ModelConfig
from cosformer.tasks import Task, from_inputs
from cosformer.training.config import Budget, Optimiser, RunConfig, kind_of


@dataclass(frozen=True)
class Phase:
    """One part of a run, with its own model, task and budget."""

    name: str
    task: Task
    model: ModelConfig
    optimiser: Optimiser
    budget: Budget
    is_last: bool
    """Whether its best checkpoint is that of the run."""


def phases(config: RunConfig, task: Task) -> list[Phase]:
    """The phases of a run on this task."""
    of_task = Phase(
        "training", task, config.model_config(task.facts), config.optimiser, config.budget, True
    )
    before = config.pretraining
    if before is None:
        return [of_task]
    inputs = from_inputs(task, before.objective, rate=before.rate)
    # the backbone of the task's model; what it pools has no part in it
    model = replace(
        of_task.model,
        kind=kind_of(inputs.facts),
        classes=None,
        pooling="mean",
    )
    optimiser = replace(config.optimiser, lr=before.lr)
    return [Phase("pretraining", inputs, model, optimiser, before.budget, False), of_task]
