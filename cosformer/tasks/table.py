"""The tasks by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cosformer.config import coerce
from cosformer.tasks import arena, classify, language, probes, tables
from cosformer.tasks.base import Task
from cosformer.tasks.vocabulary import Vocabulary

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
"""Name -> what builds the task; its keyword arguments, but `learnt` and `device`, are its options.

A known table, as `sst2`, is a name as well: `classify` with that `name`.
"""


def create(
    name: str,
    /,
    *,
    learnt: Vocabulary | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Task:
    """The task with this name; an unknown name or option is an error that lists the known ones.

    `learnt`: a vocabulary for the texts of a task with the option `tokens`, in place of its own.
    """
    found = options_of(name, options)
    if learnt is not None:
        if not has_vocabulary(name):
            raise ValueError(f"learnt must be left out for {name}, which learns no vocabulary")
        found["learnt"] = learnt
    if name in tables.KNOWN:
        return classify.classify(name=name, **found, device=device)
    return TASKS[name](**found, device=device)


def has_vocabulary(name: str) -> bool:
    """Whether the tokens of a task are of a vocabulary that can be chosen."""
    return "tokens" in _types(name)


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """These options of a task, each in its type; one that the task cannot take is an error."""
    types = _types(name)
    for option in given:
        if option not in types:
            raise ValueError(f"option of {name} must be one of {', '.join(types)}, got {option!r}")
    return {option: coerce(value, types[option], option) for option, value in given.items()}


def option_of(name: str, given: Mapping[str, Any], option: str) -> Any:
    """One option of a task: as it is given, else its default."""
    if option in given:
        return options_of(name, given)[option]
    return _parameters(name)[option].default


def data_option(name: str) -> str:
    """The option of a task that the user's data (`--data`) is."""
    return "text" if name in ("lm", "mlm") else "data"


def _types(name: str) -> dict[str, Any]:
    """The options of a task and their types."""
    known = [*TASKS, *tables.KNOWN]
    if name not in known:
        raise ValueError(f"task must be one of {', '.join(known)}, got {name!r}")
    decided = {"learnt", "device"} | ({"name"} if name in tables.KNOWN else set())
    return {each: p.annotation for each, p in _parameters(name).items() if each not in decided}


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """The arguments of what builds a known task."""
    return inspect.signature(TASKS["classify" if name in tables.KNOWN else name]).parameters
