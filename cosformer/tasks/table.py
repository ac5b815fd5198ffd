"""The tasks by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cosformer.config import coerce
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


def create(name: str, /, *, device: torch.device | str = "cpu", **options: Any) -> Task:
    """The task with this name; an unknown name or option is an error that lists the known ones."""
    found = options_of(name, options)
    if name in tables.KNOWN:
        return classify.classify(name=name, **found, device=device)
    return TASKS[name](**found, device=device)


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """These options of a task, each in its type; one that the task cannot take is an error."""
    if name not in TASKS and name not in tables.KNOWN:
        known = ", ".join([*TASKS, *tables.KNOWN])
        raise ValueError(f"task must be one of {known}, got {name!r}")
    is_table = name in tables.KNOWN
    parameters = inspect.signature(TASKS["classify" if is_table else name]).parameters
    decided = ("device", "name") if is_table else ("device",)
    types = {each: p.annotation for each, p in parameters.items() if each not in decided}
    for option in given:
        if option not in types:
            raise ValueError(f"option of {name} must be one of {', '.join(types)}, got {option!r}")
    return {option: coerce(value, types[option], option) for option, value in given.items()}
