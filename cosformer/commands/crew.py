"""Many runs side by side: processes that work on trials, their rows, and what a terminal shows."""

import contextlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic

from cosformer import records
from cosformer.check import check_new_folder, check_positive, check_threads, check_whole
from cosformer.commands.crew_run import (
    CROWDED,
    DIVERGED,
    FAILED,
    ROW,
    UNRECORDED,
    AnyTrial,
    Work,
)
from cosformer.commands.crew_share import Share
from cosformer.recipes import ONE_BY_ONE, RUNS
from cosformer.records import Row
from cosformer.training import LOG, duration, handled_by, read_json, resolved

ON_GPU, ON_CPU = 8, 1
"""Runs side by side by default."""
PROCESSES = multiprocessing.get_context("spawn")
"""How processes are begun: CUDA does not survive a fork."""
POLL = 0.2
"""Seconds from one look at the processes to the next."""
SHOWN = 2.0
"""Seconds from one table to the next on a terminal."""
TOLD = 30.0
"""Seconds from one line of progress to the next where there is no terminal."""
PATIENCE = 90.0
"""Seconds that a run may take to save itself."""


@dataclass(frozen=True, kw_only=True)
class CrewOptions:
    """How many runs go side by side, for how long, and on what."""

    jobs: int | None = None
    """Runs side by side, a process each; 8 on a GPU, 1 on a CPU if not given. Where the memory of
    the GPU is too small for so many, fewer."""
    minutes: float | None = None
    """Minutes after which running runs are saved and ended; the same command goes on with them."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes a GPU where there is one."""
    threads: int | None = None
    """CPU threads of each run; the cores divided by the runs side by side if not given."""
    graph: bool = True
    """Whether steps on a GPU are recorded as CUDA graphs. A run whose steps cannot be is
    begun again without; its row says so."""
    compile: bool = True
    """Whether torch.compile makes programs of blocks and loss where models of tokens learn on a
    GPU: a slower first step for faster ones after it."""

    out: Path | None = None
    """Folder of the runs. If not given, one in runs/ by the name of what is run, as study-lm or
    reproduce-lra, and, where a text file is learnt, by the file's name too, as study-lm-my."""
    rows: Path | None = None
    """File that rows are added to. If not given, one in results/ by the name of what is run, as
    study-lm.jsonl; where a text file is learnt rows.jsonl in the folder of the runs, and for a toy
    size rows-tiny.jsonl or rows-small.jsonl there."""

    @property
    def toy(self) -> str:
        """The size of runs by its name if it is that of toys; empty: it is not."""
        return ""

    def __post_init__(self) -> None:
        if self.jobs is not None:
            check_whole("jobs", self.jobs, 1)
        if self.threads is not None:
            check_threads(self.threads)
        if self.minutes is not None:
            check_positive("minutes", self.minutes)

    def book_of(self, name: str, kind: type[AnyTrial], data: str | None) -> "Book[AnyTrial]":
        """Where the runs of this name and their rows are.

        Runs on a text file of the user's are others than those of the same name: they lie apart.
        """
        own = f"-{Path(data).stem}" if data is not None and Path(data).is_file() else ""
        folder, path = self.out or RUNS / f"{name}{own}", Path("results") / f"{name}.jsonl"
        if own or self.toy:
            path = folder / (f"rows-{self.toy}.jsonl" if self.toy else "rows.jsonl")
        return Book(folder, self.rows or path, kind)


@dataclass(frozen=True)
class Book(Generic[AnyTrial]):
    """The rows of runs: one file, and the folder of the runs that they come from."""

    folder: Path
    path: Path
    kind: type[AnyTrial]
    """The dataclass whose fields tell one trial from another."""

    def require(self) -> None:
        """Raise unless runs and rows can be written there: asked before anything is run."""
        check_new_folder("out", self.folder)
        records.require_rows(self.path, "rows")

    def trial_of(self, row: Row) -> AnyTrial:
        names = [each.name for each in fields(self.kind)]
        return self.kind(**{name: row.config[name] for name in names if name in row.config})

    def rows(self) -> dict[AnyTrial, Row]:
        """Trials that have ended -> their last row, whether the file has it already or not."""
        known = self._kept()
        return known | self._new(known)

    def _kept(self) -> dict[AnyTrial, Row]:
        found = records.read(self.path) if self.path.exists() else []
        return {self.trial_of(row): row for row in found}

    def _new(self, known: Mapping[AnyTrial, Row]) -> dict[AnyTrial, Row]:
        """Rows of runs that have ended, and that are not known; a failure is known until it is
        mended."""
        new = dict[AnyTrial, Row]()
        for each in sorted(self.folder.glob(f"*/{ROW}")):
            with contextlib.suppress(FileNotFoundError):  # it is run again, elsewhere
                row = Row(**read_json(each))
                before = known.get(trial := self.trial_of(row))
                if before is None or (before.what == FAILED and row.what != FAILED):
                    new[trial] = row
        return new

    def results(self) -> dict[AnyTrial, float | None]:
        """Trials that have ended -> their value on validation; None: diverged, or failed."""
        return {
            trial: None if row.what in (DIVERGED, FAILED) else row.config.get("valid", row.value)
            for trial, row in self.rows().items()
        }

    def collect(self) -> None:
        """Add the rows of runs that have ended to the file, each once, whoever was killed."""
        if new := self._new(self._kept()):
            records.append(self.path, new.values())


@dataclass
class Running(Generic[AnyTrial]):
    """A run that a process works on."""

    work: Work[AnyTrial]
    process: BaseProcess
    began: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.work.trial.name

    @property
    def seconds(self) -> float:
        """How long the process has worked on it."""
        return time.monotonic() - self.began

    def line(self) -> list[str]:
        """The line of this run in the live table."""
        trial, last = self.work.trial, self.last()
        cells = [trial.case, f"{trial.rate:g}", str(trial.seed)]
        if last is None:
            return [*cells, "begins", "", "", ""]
        steps = f"{last['step']:,}/{last['steps']:,}"
        bits, speed = f"{last['loss'] / math.log(2):.3f}", f"{last['tokens_per_second']:,.0f}"
        return [*cells, steps, bits, speed, duration(last["seconds_left"])]

    def last(self) -> Mapping[str, Any] | None:
        """The last line of its log about steps; a line that is being written does not count."""
        log = self.work.out / LOG
        if not log.exists():
            return None
        for line in reversed(log.read_bytes().splitlines()):
            with contextlib.suppress(ValueError):
                if "loss" in (found := json.loads(line)):
                    return dict(found)
        return None


HEADER = ["entry", "rate", "seed", "step", "bits", "tokens/s", "left"]


class Crew(Generic[AnyTrial]):
    """Processes that work on trials, so many at a time; whatever one does, others go on."""

    def __init__(
        self,
        options: CrewOptions,
        todo: Sequence[AnyTrial],
        *,
        book: Book[AnyTrial],
        data: str | None,
        target: Callable[[Work[AnyTrial]], None],
        share: Share | None = None,
    ) -> None:
        """`target`: what the process of a trial does. `data`: as `Work` has it.

        `share`: which trials are this crew's; None: all.
        """
        self.options, self.book, self.data, self.target = options, book, data, target
        self.share = share or Share()
        self.device = resolved(options.device)
        self.has_gpu = self.device.startswith("cuda")
        self.jobs = options.jobs or (ON_GPU if self.has_gpu else ON_CPU)
        self.waiting = [self.work_on(trial) for trial in todo]
        self.running: list[Running[AnyTrial]] = []
        self.elsewhere: set[AnyTrial] = set()
        """Trials that other crews have taken."""
        self.failed: dict[str, str] = {}
        self.took: list[float] = []
        """Seconds of each run that has ended."""
        self.total = len(todo)
        minutes = options.minutes
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def work(self) -> None:
        """Until all is done or time is up; an interrupt, too, saves what runs."""
        screen = Screen()
        try:
            while self.waiting or self.running or self.is_needed():
                if self._end is not None and time.monotonic() >= self._end:
                    break
                while self.waiting and len(self.running) < self.jobs:
                    todo = self.waiting.pop(0)
                    if self.share.takes(todo.trial.name):
                        self._start(todo)
                    else:
                        self.elsewhere.add(todo.trial)
                time.sleep(POLL)
                for each in [r for r in self.running if not r.process.is_alive()]:
                    self._ended(each)
                screen.show(self)
        finally:
            print(Screen.CLEAR, end="", flush=True)
            self._stop()
            self.collect()

    def collect(self) -> None:
        """Keep the rows of runs that have ended, as the first of many crews does for all."""
        if self.share.is_first:
            self.book.collect()

    def is_needed(self) -> bool:
        """Whether there may be more to do, though nothing waits or runs here."""
        return False

    def work_on(self, trial: AnyTrial) -> Work[AnyTrial]:
        """The trial as it is run here."""
        options, out = self.options, self.book.folder / trial.name
        without = out.with_name(out.name + ONE_BY_ONE)
        graph = options.graph and self.has_gpu and not without.exists()
        return Work(
            trial,
            without if self.has_gpu and not graph else out,
            data=self.data,
            device=self.device,
            graph=graph,
            compile=None if options.compile else False,
            threads=options.threads or max(1, (os.cpu_count() or 1) // self.side_by_side),
            jobs=self.jobs if self.has_gpu else self.side_by_side,
        )

    @property
    def side_by_side(self) -> int:
        """Runs at a time on this machine, those of other crews included."""
        return self.jobs * self.share.neighbours

    def processes(self) -> BaseContext:
        """How processes are begun. Toys on a CPU end sooner than a process has imported PyTorch:
        theirs are forked."""
        methods = multiprocessing.get_all_start_methods()
        if self.has_gpu or not self.options.toy or "forkserver" not in methods:
            return PROCESSES
        found = multiprocessing.get_context("forkserver")
        found.set_forkserver_preload([Work.__module__, "torch._dynamo"])  # optimisers import it
        return found

    def more(self) -> None:
        """A run has ended: a crew that plans by results may now have more to do."""

    def lost(self, each: Running[AnyTrial], reason: str) -> None:
        """A run has ended without a row."""
        self.failed[each.name] = reason

    def _start(self, todo: Work[AnyTrial]) -> None:
        (todo.out / ROW).unlink(missing_ok=True)  # of a time when it failed
        process = self.processes().Process(  # type: ignore[attr-defined]
            target=self.target, args=(todo,), name=todo.trial.name
        )
        process.start()
        self.running.append(Running(todo, process))

    def _ended(self, each: Running[AnyTrial]) -> None:
        """A run has ended by itself: its row is kept, or why there is none."""
        self.running.remove(each)
        each.process.join()
        todo, code = each.work, each.process.exitcode
        if (todo.out / ROW).exists():
            self.took.append(each.seconds)
            self.collect()
            said = todo.trial.spell(self.book.results().get(todo.trial))
            print(f"{Screen.CLEAR}{each.name}: {said} in {duration(each.seconds)}", flush=True)
        elif code == UNRECORDED:
            print(f"{Screen.CLEAR}{each.name}: begun again without a CUDA graph", flush=True)
            without = todo.out.with_name(todo.out.name + ONE_BY_ONE)
            self.waiting.insert(0, replace(todo, graph=False, out=without))
        elif code == CROWDED and todo.jobs > 1:  # it was not alone
            self.jobs = max(1, min(self.jobs, todo.jobs - 1, len(self.running)))
            told = f"out of memory beside others, goes on later; now {self.jobs} at a time"
            print(f"{Screen.CLEAR}{each.name}: {told}", flush=True)
            self.waiting.insert(0, replace(todo, jobs=self.jobs))
        else:
            self.lost(each, f"exit code {code}, see {todo.printed}")
        self.more()

    def _stop(self) -> None:
        """Have running runs save themselves, and wait for it."""
        with handled_by(lambda *_: None):  # a second Ctrl-C or SIGTERM must not keep them from it
            for each in self.running:
                each.process.terminate()
            end = time.monotonic() + PATIENCE
            for each in self.running:
                each.process.join(max(0.0, end - time.monotonic()))
                if each.process.is_alive():
                    each.process.kill()
                    each.process.join()

    @property
    def left(self) -> int:
        """Trials that have not ended, and that no other crew has taken."""
        return self.total - len(self.took) - len(self.failed) - len(self.elsewhere)

    def seconds_left(self) -> float | None:
        """About how long all that is left takes, by the runs that have ended or are running."""
        lasts = [
            (each.seconds, last["seconds_left"]) for each in self.running if (last := each.last())
        ]
        known = self.took or [spent + left for spent, left in lasts]
        if not known:
            return None
        waiting = max(0, self.left - len(lasts))
        seconds = sum(left for _, left in lasts) + waiting * statistics.fmean(known)
        return seconds / self.jobs


class Screen:
    """The live table on a terminal; elsewhere a line from time to time."""

    CLEAR = "\r\x1b[J" if sys.stdout.isatty() else ""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._next = time.monotonic() + (0.0 if self.is_terminal else TOLD)

    def show(self, crew: Crew[Any]) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (SHOWN if self.is_terminal else TOLD)
        lines = table(crew, *shutil.get_terminal_size((80, 24)))
        if self.is_terminal:
            # the cursor goes back, so that the next table stands in the place of this one
            print(f"{self.CLEAR}" + "\n".join(lines) + f"\x1b[{len(lines) - 1}A", end="\r")
            sys.stdout.flush()
        else:
            print("\n".join(lines), flush=True)


def table(crew: Crew[Any], columns: int, rows: int) -> list[str]:
    """What runs now, in lines that fit a terminal."""
    lines = [HEADER, *(each.line() for each in crew.running[: max(1, rows - 4)])]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEADER))]
    shown = [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    seconds = crew.seconds_left()
    left = "" if seconds is None else f", about {duration(seconds)} left"
    ended = len(crew.took)
    others = f", {len(crew.elsewhere)} elsewhere" if crew.elsewhere else ""
    count = (
        f"{ended} of {crew.total} ended, {len(crew.running)} run, "
        f"{crew.left - len(crew.running)} wait{others}{left}"
    )
    return [line[: columns - 1] for line in [*shown, count]]
