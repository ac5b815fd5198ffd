"""What models are trained and judged on: batches as a pure function of seed, rank and step."""

from cosformer.tasks.base import IGNORED, SPECIALS, SPLITS, Batch, Facts, Task
from cosformer.tasks.language import LanguageTask, MaskedTask
from cosformer.tasks.sequences import SequenceTask
from cosformer.tasks.table import TASKS, create

__all__ = [
    "IGNORED",
    "SPECIALS",
    "SPLITS",
    "TASKS",
    "Batch",
    "Facts",
    "LanguageTask",
    "MaskedTask",
    "SequenceTask",
    "Task",
    "create",
]
