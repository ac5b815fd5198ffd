"""A task that begins with easier samples: where all are hard, noise is all that labels give."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from cosformer.tasks.base import Batch, BatchId, Facts, require_options
from cosformer.tasks.ragged import Ragged
from cosformer.tasks.sequences import Samples, SequenceTask


class RisingTask(SequenceTask):
    """`steps` steps with each of the `levels` of `easier` samples, then the task's own samples.

    Half of a batch is of the level that is due, half of one before it, each in its turn, so that
    none is forgotten. Sequences are of one length; validation and test are the task's own.
    """

    def __init__(
        self,
        splits: Mapping[str, Sequence[Ragged]],
        facts: Facts,
        device: torch.device | str = "cpu",
        *,
        easier: Callable[[], Sequence[Ragged]],
        levels: int,
        steps: int,
    ) -> None:
        super().__init__(splits, facts, device)
        require_options(levels=levels, steps=steps)
        self._easier, self._count, self._steps = easier, levels, steps

    @cached_property
    def _levels(self) -> list[Samples]:
        return [Samples([x], self.facts, self.device, shuffled=True) for x in self._easier()]

    def _batch(self, which: BatchId, draws: np.random.Generator) -> Batch:
        level = which.step // self._steps
        if which.split != "train" or level >= self._count:
            return super()._batch(which, draws)
        known = which.batch_size // 2 if level else 0
        due = self._levels[level].batch(replace(which, batch_size=which.batch_size - known))
        if not known:
            return due
        before = self._levels[which.step % level].batch(replace(which, batch_size=known))
        return {name: torch.cat([due[name], before[name]]) for name in due}
