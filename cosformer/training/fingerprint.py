"""Whether the data are those that a run began with: a file may change while its name stays."""

from pathlib import Path
from typing import Any

from cosformer.config import differences
from cosformer.tasks import Task, data_option
from cosformer.training.folder import DATA, load_config, read_json, setting, write_json


def fingerprint(task: Task) -> dict[str, Any]:
    """Sizes, what is asked, and a checksum of all data."""
    return {
        "sizes": dict(task.sizes),
        "tokens": task.facts.data_tokens,
        "classes": task.facts.classes,
        "floor": round(task.facts.floor, 6),  # other machines may add up in another order
        "content": task.digest(),
    }


def keep(folder: Path, task: Task) -> None:
    """Write the fingerprint of a new run."""
    write_json(folder / DATA, fingerprint(task))


def require_same(folder: Path, task: Task) -> None:
    """An error if the data are not those that the run began with; nothing is written."""
    path = folder / DATA
    if not path.exists():
        raise ValueError(f"run must say what data it began with, got {folder} without {DATA}")
    before, now = read_json(path), fingerprint(task)
    if wrong := differences(before, now):
        task_there = load_config(folder).task
        known = task_there.options.get(data_option(task_there.name))
        where = "" if known is None else f" ({known})"
        raise ValueError(
            f"data must be those that the run in {folder} began with, got "
            f"{_difference(before, now, wrong[0])}: bring the old data back{where}, or train "
            "in another folder"
        )


def _difference(before: dict[str, Any], now: dict[str, Any], where: str) -> str:
    """What is other than before in a part of the fingerprint, in words."""
    part, _, split = where.partition(".")
    counted = {"sizes": f"samples in {split}", "tokens": "different tokens", "classes": "classes"}
    if part not in counted:
        return "as many samples with other contents"
    had, has = (setting(each, where) or 0 for each in (before, now))
    return f"{has:,} {counted[part]} where it had {had:,}"
