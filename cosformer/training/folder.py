"""The folder of a run: who works in it, its config, its state, its log, its checkpoints."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from cosformer.check import check_new_folder
from cosformer.config import build, differences, plain
from cosformer.tasks import data_option, replacing
from cosformer.training.checkpoints import clean
from cosformer.training.config import ELSEWHERE, RunConfig, TaskConfig

CONFIG, STATUS, LOG, LOCK = "config.json", "status.json", "log.jsonl", "lock"
LAST, BEST = "last.safetensors", "best.safetensors"
BOARD, VOCABULARY, DATA = "tensorboard", "vocabulary.json", "data.json"
TOKENIZER, LABELS, WANDB = "tokenizer.json", "labels.json", "wandb.json"
WRITTEN = (CONFIG, STATUS, VOCABULARY, TOKENIZER, LABELS, WANDB, DATA, LAST, BEST)
"""Files that are replaced as a whole."""
OF_EVERY_RUN = {"task", "out", "preset", "model", "optimiser", "schedule", "budget", "evaluation"}
"""Settings that every run keeps, however old it is."""
LATE = 60.0
"""Seconds within which every machine sees what another has written into a shared folder."""
STATES = ("running", "finished", "failed")
"""Of a run that a process has, that has ended, or that an error has ended."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works in a run; the lock falls when that ends, however it does."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"out must be a run that nobody works in, got {folder}, which is being trained"
            ) from None
        for path in _unfinished(folder):
            path.unlink()
        for name in (LAST, BEST):
            clean(folder / name)
        yield


def adopt(config: RunConfig) -> None:
    """Make the folder this run's, or its run as long and with data where this one has them.

    Another one is refused.
    """
    if not is_same_run(config):
        write_json(config.out / CONFIG, plain(config))
        return
    there = load_config(config.out)
    now = _with_data_of(_as_long(there, config), config)
    if plain(now) != plain(there):
        write_json(config.out / CONFIG, plain(now))


def going_on(config: RunConfig) -> RunConfig:
    """The config of the run that goes on in its folder: one with more steps extends that run.

    Fewer steps than the run has are an error; so are other settings, of which `is_same_run` tells.
    """
    if not (config.out / CONFIG).is_file():
        return config
    there = load_config(config.out)
    same = _with_data_of(_as_long(there, config), config)
    found, wanted = (comparable(plain(each)) for each in (same, config))
    if differences(found, wanted) or config.extended not in ((), there.extended):
        return config
    steps, had = config.budget.steps, there.budget.steps
    if steps < had:
        raise ValueError(
            f"budget.steps (--steps) must be at least the {had:,} of the run in {config.out}, "
            f"got {steps:,}: it can be extended, not shortened"
        )
    return replace(config, extended=there.extended if steps == had else there.ends)


def require_visible(folder: Path) -> None:
    """An error unless this process sees the folder in which another has begun a run.

    A machine may see what another writes into a shared folder some seconds later.
    """
    end = time.monotonic() + LATE
    while not all((folder / name).is_file() for name in (CONFIG, DATA)):
        if time.monotonic() > end:
            raise ValueError(f"out must be a folder that all processes share, got {folder}")
        time.sleep(0.1)


def is_same_run(config: RunConfig) -> bool:
    """Whether the folder holds this run, or a shorter one that it extends; False: nothing.

    A folder with anything else is refused. Data may lie elsewhere than when the run began: that
    they are the same is a question for `fingerprint.require_same`.
    """
    if not check_new_folder("out", config.out).exists():
        return False
    if not (config.out / CONFIG).exists():
        _require_empty(config.out)
        return False
    there = load_config(config.out)
    if config.ends[: len(there.ends)] == there.ends:
        there = _as_long(there, config)
    there = _with_data_of(there, config)
    found, wanted = (comparable(plain(each)) for each in (there, config))
    if wrong := differences(found, wanted):
        there, here = (setting(each, wrong[0]) for each in (found, wanted))
        others = len(wrong) - 1
        differ = "setting differs" if others == 1 else "settings differ"
        more = f" and {others} more {differ}" if others else ""
        raise ValueError(
            f"out must be a new folder or that of the same run, got {config.out} with "
            f"{wrong[0]} = {there!r}, here it is {here!r}{more}"
        )
    return True


def load_config(folder: Path) -> RunConfig:
    """The config that a run folder keeps; settings that are newer than it have their defaults."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"run must be a folder with {CONFIG}, got {folder}")
    given = read_json(path)
    try:
        return build(RunConfig, given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} must be the config of a run: {error}") from None


def is_whole(settings: Mapping[str, Any]) -> bool:
    """Whether settings are those that a run keeps, which are all, and not a few by hand."""
    return settings.keys() >= OF_EVERY_RUN


def comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """What decides the result of a run, as JSON holds it."""
    kept = {name: value for name, value in settings.items() if name not in ELSEWHERE}
    return json.loads(json.dumps(kept))


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, or nested too deeply
        raise ValueError(f"{path} must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}")
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def state_of(folder: Path) -> dict[str, Any]:
    """`status.json`, its state as it is now: one that runs without a process was interrupted."""
    path = folder / STATUS
    status = read_json(path) if path.exists() else {"state": "running", "step": 0}
    if status.get("state") not in STATES:
        raise ValueError(
            f"state in {path} must be one of {', '.join(STATES)}, got {status.get('state')!r}"
        )
    if status["state"] == "running" and not _is_locked(folder):
        status["state"] = "interrupted"
    return status


class Log:
    """JSON lines. Lines of steps that the checkpoint does not have are removed: those steps are
    taken, and written, again."""

    def __init__(self, path: Path, is_done: Callable[[dict[str, Any]], bool]) -> None:
        """`is_done` tells of a line whether the checkpoint has its step."""
        self._file: IO[bytes] = path.open("ab")
        lines = path.read_bytes().splitlines(keepends=True)
        kept = itertools.takewhile(lambda line: _is_kept(line, is_done), lines)
        self._file.truncate(sum(map(len, kept)))

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _is_kept(line: bytes, is_done: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a line is whole, and of a step that is done."""
    try:
        return line.endswith(b"\n") and is_done(json.loads(line))
    except (ValueError, TypeError, LookupError):  # no JSON, or no line of a log
        return False


def _as_long(config: RunConfig, other: RunConfig) -> RunConfig:
    """The config with the steps of another."""
    budget = replace(config.budget, steps=other.budget.steps)
    return replace(config, budget=budget, extended=other.extended)


def located(task: TaskConfig, data: object) -> TaskConfig:
    """The task with its data elsewhere; None: without that option."""
    option = data_option(task.name)
    options = {name: value for name, value in task.options.items() if name != option}
    return replace(task, options=options if data is None else {**options, option: data})


def _with_data_of(config: RunConfig, other: RunConfig) -> RunConfig:
    """The config with the data where another has them, if `data.json` says what they must be."""
    if not (other.out / DATA).is_file():
        return config
    data = other.task.options.get(data_option(config.task.name))
    return replace(config, task=located(config.task, data))


def _is_locked(folder: Path) -> bool:
    import fcntl

    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _require_empty(folder: Path) -> None:
    """But for what a run that was killed before it had a config leaves."""
    own = {folder / LOCK, *_unfinished(folder)}
    if foreign := sorted(path.name for path in folder.iterdir() if path not in own):
        raise ValueError(f"out must be a run or an empty folder, got {folder} with {foreign[0]}")


def _unfinished(folder: Path) -> list[Path]:
    """What a killed writer left: files that never got their name."""
    return [
        path
        for path in folder.iterdir()
        if any(path.name.startswith(f".{name}.") for name in WRITTEN)
    ]


def setting(settings: Any, path: str) -> Any:
    """What settings have at a path such as `budget.steps`; None: nothing."""
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings
