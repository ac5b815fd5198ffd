"""The inputs of a task as a task of their own: what a model can learn from before the labels."""

import dataclasses

import numpy as np
import torch

from cosformer.tasks.base import IGNORED, Batch, BatchId, Derived, Task, facts_of_inputs
from cosformer.tasks.language import MaskedTask


def from_inputs(task: Task, objective: str, *, rate: float) -> Task:
    """Masked tokens (`masked`, a share `rate`) or the next token (`causal`) of the inputs."""
    task = task if task.facts.towers == 1 else Stacked(task)
    if objective == "masked":
        return MaskedTask(task, rate=rate)
    if objective == "causal":
        return NextToken(task)
    raise ValueError(f"objective must be one of masked, causal, got {objective!r}")


class NextToken(Derived):
    """Every label is the token that follows, where one of the data does."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, facts_of_inputs(task.facts, causal=True))

    def _batch(self, which: BatchId, draws: np.random.Generator) -> Batch:
        batch = self.task._batch(which, draws)
        following = batch["tokens"][:, 1:]
        asked = batch["mask"][:, 1:] & (following < self.facts.data_tokens)
        labels = torch.full_like(batch["tokens"], IGNORED)
        labels[:, :-1] = torch.where(asked, following, IGNORED)
        return {"tokens": batch["tokens"], "mask": batch["mask"], "labels": labels}


class Stacked(Derived):
    """The two towers of a sample as two samples; what was asked of both is asked no more."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, dataclasses.replace(task.facts, towers=1, asked=None))

    def _batch(self, which: BatchId, draws: np.random.Generator) -> Batch:
        batch = self.task._batch(which, draws)
        width = max(batch["tokens"].shape[1], batch["tokens2"].shape[1])
        found = {}
        for name, fill in (("tokens", self.facts.token("pad")), ("mask", False)):
            parts = (batch[name], batch[f"{name}2"])
            found[name] = torch.cat(
                [
                    torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill)
                    for part in parts
                ]
            )
        return found
