"""What a recipe may know: the machine, the user's data, and what the model must be able to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosformer.models import Use, recommended
from cosformer.training import Objective

RUNS = Path("runs")
"""Where runs are kept unless somewhere else is named."""

USES: dict[str, Use] = {
    "lm": "lm", "mlm": "mlm", "mqar": "recall", "copying": "recall", "induction": "recall",
}  # fmt: skip
"""Task -> the use that its model is recommended for; those that are not here classify."""


def use_of(task: str) -> Use:
    """The use that the model of a task is recommended for."""
    return USES.get(task, "classify")


def tenth(steps: int) -> int:
    """From one evaluation of a run to the next: about ten in all."""
    return max(1, steps // 10)


@dataclass(frozen=True)
class Setting:
    """Where a run will be, and what was asked for that its defaults depend on."""

    device: str = "cpu"
    """`cpu` or `cuda`: a recipe gives a CPU less to do, so that it ends within minutes."""
    data: str | None = None
    """The user's file or folder, or the name of a text; none: what the task has by default."""
    mechanism: str | None = None
    """The mechanism, or a pattern of several, that was asked for; none: the recommended one."""
    pretrain: Objective | None = None
    """What is learnt from the task's inputs before the task; none: nothing."""

    @property
    def has_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def model(self, task: str) -> dict[str, Any]:
        """Fields of the model recommended for a task, with the mechanism that was asked for."""
        return recommended(use_of(task), self.mechanism, both_ways=self.pretrain == "masked")
