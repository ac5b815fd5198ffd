"""One run of many, in a process of its own: it learns, is judged, and leaves its row."""

import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from cosformer import records
from cosformer.models import parameter_count
from cosformer.recipes import TableRun, Trial
from cosformer.records import Row
from cosformer.training import (
    ALONE,
    Diverged,
    Progress,
    Trainer,
    resolved,
    write_json,
)

ROW = "row.json"
"""The file, in the folder of a run that has ended, with its row."""
DIVERGED = "diverged"
"""The quantity of a run whose loss was not finite: its value is the step that was reached."""
FAILED = "failed"
"""The quantity of a run that cannot be run: its value is the exit code of its process."""
UNRECORDED = 3
"""Exit code of a process whose steps could not be recorded as a CUDA graph."""
CROWDED = 4
"""Exit code of a process for which the GPU had no memory left."""
NO_MEMORY = ("out of memory", "ALLOC_FAILED")
"""What PyTorch, CUDA and cuBLAS say where there is none left."""
INTERRUPTED = 143
"""Exit code of a process that was asked to end."""


AnyTrial = TypeVar("AnyTrial", bound=Trial | TableRun)
"""One run of a study or of a table, by what tells it from the others: rows have its fields."""


@dataclass(frozen=True)
class Work(Generic[AnyTrial]):
    """A trial, and where and how it is run."""

    trial: AnyTrial
    out: Path
    """Folder of the run."""
    data: str | None
    """Folder of the data, or a text file in its place."""
    device: str
    graph: bool
    """Whether steps are recorded as CUDA graphs."""
    compile: bool | None
    """Whether torch.compile makes programs of blocks and loss; None: as `RunConfig` has it."""
    threads: int
    jobs: int
    """Runs side by side, which share the speed of the device."""

    @property
    def printed(self) -> Path:
        """The file with what the process prints, its errors too."""
        return self.out.with_name(f"{self.out.name}.txt")


class Judged(NamedTuple):
    """What a run is worth, as its row tells it."""

    what: str
    value: float
    unit: str
    told: dict[str, Any]
    """What else the row's config has."""


def work(todo: Work[Any], row_of: Callable[[Work[Any]], Row]) -> None:
    """Run a trial from where it stands to its end; the row of its result is then in its folder.

    SIGTERM, or the end of the process that began this one, saves the run and ends it.
    """
    todo.printed.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(todo.printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the parent tells by SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(todo.threads)
    try:
        row = row_of(todo)
    except KeyboardInterrupt:
        print("interrupted, and saved", flush=True)
        sys.exit(INTERRUPTED)
    except RuntimeError as error:
        if any(each in str(error) for each in NO_MEMORY):
            traceback.print_exc()
            sys.exit(CROWDED)
        if todo.graph and "captur" in str(error):  # so PyTorch and CUDA tell of it
            traceback.print_exc()
            sys.exit(UNRECORDED)
        raise
    write_json(todo.out / ROW, dataclasses.asdict(row))


def ended_row(
    todo: Work[Any], described: dict[str, Any], judge: Callable[[Trainer], Judged]
) -> Row:
    """Run a trial to its end, and judge what it has learnt; one that diverged is a row as well.

    `described`: what the trial is, as the config of every row of it has it.
    """
    config = todo.trial.config(
        todo.out, data=todo.data, device=todo.device, graph=todo.graph, compile=todo.compile
    )
    this = records.Run.begin(device=resolved(todo.device), seed=todo.trial.seed)
    trainer = Trainer(config, processes=ALONE)  # of many each has trials of its own
    try:
        for event in trainer.events():
            print(event, flush=True)
            if isinstance(event, Progress) and not _is_asked_for():
                raise KeyboardInterrupt
    except Diverged as error:
        print(error, flush=True)
        told = {"reason": str(error)}
        return this.row(DIVERGED, trainer.place.step, "steps", **_finite(described | told))
    size = parameter_count(trainer.result.model)
    what, value, unit, told = judge(trainer)
    return this.row(what, value, unit, **_finite(described | {"parameters": size} | told))


def _finite(value: Any) -> Any:
    """The value with text in place of infinities and of NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_asked_for() -> bool:
    """Whether the process that began this one is still there to keep the row."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()
