"""What models are trained and judged on: batches as a pure function of seed, rank and step."""

from cosformer.tasks import arena, files, generated, tables, text
from cosformer.tasks.base import IGNORED, SPLITS, Batch, Facts, Task
from cosformer.tasks.classify import Read, Reader
from cosformer.tasks.files import replacing, sync_names
from cosformer.tasks.language import LanguageTask, MaskedTask
from cosformer.tasks.pretraining import from_inputs
from cosformer.tasks.ragged import Array
from cosformer.tasks.sequences import SequenceTask, cut_note, empty_note
from cosformer.tasks.table import (
    TASKS,
    create,
    data_option,
    has_vocabulary,
    option_of,
    options_of,
)
from cosformer.tasks.tables import KNOWN, Names
from cosformer.tasks.text import FROM_PYTHON, TEXTS
from cosformer.tasks.vocabulary import SPECIALS, Bytes, Vocabulary, Words, restore

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
