"""The tasks by name."""

import inspect
from collections.abc import Callable
from typing import Any

from cosformer.tasks import arena, classify, language, probes, tables
from cosformer.tasks.base import Task

TASKS: dict[str, Callable[..., Task]] = {
    "lm": language.language,
    "mlm": language.masked,
    "classify": classify.classify,
    "listops": arena.listops,
    "text": arena.text,
    "retrieval": arena.retrieval,
    "image": arena.image,
    "pathfinder": arena.pathfinder,
    "mqar": probes.Recall,
    "copying": probes.Copying,
    "induction": probes.Induction,
}
"""Name -> what builds the task; its keyword arguments are the task's options.

A known table, as `sst2`, is a name as well: `classify` with that `name`.
"""


def create(name: str, /, **options: Any) -> Task:
    """The task with this name; an unknown name or option is an error that lists the known ones."""
    if name in tables.KNOWN:
        return create("classify", name=name, **options)
    if name not in TASKS:
        known = ", ".join([*TASKS, *tables.KNOWN])
        raise ValueError(f"task must be one of {known}, got {name!r}")
    known_options = inspect.signature(TASKS[name]).parameters
    for option in options:
        if option not in known_options:
            raise ValueError(
                f"option of {name} must be one of {', '.join(known_options)}, got {option!r}"
            )
    return TASKS[name](**options)
