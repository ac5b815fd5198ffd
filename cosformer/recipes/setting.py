"""What a recipe may know: the machine, and the user's data."""

from dataclasses import dataclass
from pathlib import Path

RUNS = Path("runs")
"""Where runs are kept unless somewhere else is named."""


def tenth(steps: int) -> int:
    """From one evaluation of a run to the next: about ten in all."""
    return max(1, steps // 10)


@dataclass(frozen=True)
class Setting:
    """Where a run will be."""

    device: str = "cpu"
    """`cpu` or `cuda`: a recipe gives a CPU less to do, so that it ends within minutes."""
    data: str | None = None
    """The user's file or folder, or the name of a text; none: what the task has by default."""

    @property
    def has_gpu(self) -> bool:
        return self.device.startswith("cuda")
