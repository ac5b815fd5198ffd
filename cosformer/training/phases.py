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
    extended: tuple[int, ...] = ()
    """Numbers of steps that it ended with before the run was extended."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The steps after which it ends, or has ended."""
        return (*self.extended, self.budget.steps)

    def end(self, step: int) -> int:
        """The number of steps by which the learning rate of a step, counted from 1, is chosen."""
        return next(end for end in self.ends if step <= end)

    def unlogged(self, step: int, log_every: int) -> int:
        """Steps up to this one that no line of the log tells of; every end has a line as well."""
        before = max((end for end in self.ends if end <= step), default=0)
        return min(step % log_every, step - before)


def phases(config: RunConfig, task: Task) -> list[Phase]:
    """The phases of a run on this task."""
    model = config.model_config(task.facts)
    of_task = Phase("training", task, model, config.optimiser, config.budget, True, config.extended)
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
