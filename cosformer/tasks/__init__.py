"""What models are trained and judged on: batches as a pure function of seed, rank and step."""

from cosformer.tasks import arena as arena
from cosformer.tasks import files as files
from cosformer.tasks import generated as generated
from cosformer.tasks import tables as tables
from cosformer.tasks import text as text
from cosformer.tasks.base import IGNORED, SPECIALS, SPLITS, Batch, Facts, Task
from cosformer.tasks.files import replacing as replacing
from cosformer.tasks.language import LanguageTask, MaskedTask
from cosformer.tasks.pretraining import from_inputs as from_inputs
from cosformer.tasks.ragged import Array as Array
from cosformer.tasks.sequences import SequenceTask
from cosformer.tasks.table import TASKS, create
from cosformer.tasks.table import has_vocabulary as has_vocabulary
from cosformer.tasks.table import options_of as options_of
from cosformer.tasks.tables import KNOWN as KNOWN
from cosformer.tasks.text import FROM_PYTHON as FROM_PYTHON
from cosformer.tasks.text import TEXTS as TEXTS
from cosformer.tasks.vocabulary import Vocabulary as Vocabulary
from cosformer.tasks.vocabulary import Words as Words
from cosformer.tasks.vocabulary import restore as restore

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
