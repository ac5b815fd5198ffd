"""`cosformer study`: many mechanisms under one protocol, several runs side by side."""

import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from cosformer import records
from cosformer.check import check_positive, check_whole
from cosformer.commands.study_run import DIVERGED, ROW, UNRECORDED, Work, work
from cosformer.recipes import PROBES, RUNS, STUDIES, Scale, Stage, Trial, check_names, trials
from cosformer.records import Row
from cosformer.training import LOG, duration, read_json, resolved

POSITIONAL = "task"
WORDS = {
    "only": [*dict.fromkeys(name for study in STUDIES.values() for name in study.entries)],
    "probes": [*PROBES["full"]],
}
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
ONE_BY_ONE = "-one-by-one"
"""End of the folder's name of a run whose steps are not recorded."""


@dataclass(frozen=True)
class Options:
    """Compare mechanisms on the bytes of enwik8 or on generated probes, all under one protocol.
    Every run that ends is one row. Stopped at any moment, the same command goes on; what is
    finished is not run again.

    cosformer study lm

    cosformer study lm --stage seeds --finalists 6

    cosformer study mlm --only softmax gated-conv-norm-sigmoid --jobs 4 --minutes 9

    cosformer study probes --probes mqar-256 induction
    """

    task: Literal["lm", "mlm", "probes"]
    """What is learnt: the next byte (lm), masked bytes (mlm), or small tasks that linear attention
    finds hard (probes)."""
    stage: Stage = "rates"
    """rates: every entry at all rates; seeds: finalists at their best rate with three seeds; long:
    finalists at their best rate for more steps; speed: finalists timed, one after another."""
    only: tuple[str, ...] = ()
    """Entries by name; all of them in the stage rates, the finalists in others, if not given."""
    probes: tuple[str, ...] = ()
    """Probes by name: mqar-64, mqar-128, mqar-256, mqar-512, copying, induction; all of them if not
    given. For the study of probes alone."""
    rates: tuple[float, ...] = ()
    """Highest learning rates. If not given, all of the protocol in the stage rates, and in others
    the best one of an entry that is done at all of them."""
    finalists: int = 6
    """Number of finalists, the best on validation, for each probe; softmax is one more if it is not
    among them."""
    jobs: int | None = None
    """Runs side by side, a process each; 8 on a GPU, 1 on a CPU if not given."""
    minutes: float | None = None
    """Minutes after which running runs are saved and ended; the same command goes on with them."""
    data: str | None = None
    """Folder with enwik8.xz, or another text file; the data folder if not given. Probes have no
    data."""
    out: Path | None = None
    """Folder of the runs; runs/study-TASK if not given."""
    rows: Path | None = None
    """File that rows are added to; results/study-TASK.jsonl if not given, and for --scale tiny
    rows-tiny.jsonl in the folder of the runs."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes a GPU where there is one."""
    threads: int | None = None
    """CPU threads of each run; the cores divided by the runs side by side if not given."""
    graph: bool = True
    """Whether steps on a GPU are recorded as CUDA graphs. A run whose steps cannot be is
    begun again without; its row says so."""
    compile: bool = False
    """Whether torch.compile makes one program of model and loss: a minute more at first, then
    faster steps. It pays for long runs."""
    scale: Scale = "full"
    """Size of models and runs. 4k, 16k: sequences of 4,096 or 16,384 tokens; base: 12 layers of
    768; tiny: a toy size, on a text of yours (--data) or on probes, to try the command out in
    seconds. Probes have the scales full and tiny."""

    def __post_init__(self) -> None:
        check_names(self.task, only=self.only, probes=self.probes, scale=self.scale)
        for name in ("finalists", "jobs", "threads"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.minutes is not None:
            check_positive("minutes", self.minutes)
        for rate in self.rates:
            check_positive("rates", rate)
        if self.data is not None and self.task == "probes":
            raise ValueError(f"data must not be given for probes, which are drawn, got {self.data}")
        if self.data is not None and not Path(self.data).exists():
            raise ValueError(f"data must be a folder or a text file, got {self.data}")

    @property
    def folder(self) -> Path:
        return self.out or RUNS / f"study-{self.task}"

    @property
    def rows_file(self) -> Path:
        if self.rows is not None:
            return self.rows
        if self.scale == "tiny":
            return self.folder / "rows-tiny.jsonl"
        return Path("results") / f"study-{self.task}.jsonl"


def run(options: Options) -> int:
    """0, also where time is up; 1 if runs have failed."""
    path = options.rows_file
    records.require_rows(path, "rows")
    collect(options.folder, path)
    done = results(path)
    planned = trials(
        options.task,
        options.stage,
        done,
        only=options.only,
        probes=options.probes,
        rates=options.rates,
        finalists=options.finalists,
        scale=options.scale,
    )
    todo = [trial for trial in planned if trial not in done]
    print(
        f"{options.task}, {options.stage}: {len(planned)} runs, {len(planned) - len(todo)} done; "
        f"runs in {options.folder}, rows in {path}",
        flush=True,
    )
    crew = Crew(options, todo)
    crew.work()
    done = results(path)
    ended = sum(trial in done for trial in planned)
    ranked = {t: v for t in planned if (v := done.get(t)) is not None}
    sign = STUDIES[options.task].sign
    best = sorted(ranked, key=lambda trial: sign * ranked[trial])
    for trial in best[:10]:
        print(f"  {spell(trial, ranked[trial])}  {trial.name}")
    more = "" if ended == len(planned) else "; the same command goes on"
    print(f"{ended} of {len(planned)} runs are done, {len(crew.failed)} have failed{more}")
    for name, reason in crew.failed.items():
        print(f"cosformer: study: {name} failed: {reason}", file=sys.stderr)
    return 1 if crew.failed else 0


def results(path: Path) -> dict[Trial, float | None]:
    """Trials whose rows are there -> their value on validation; None: the run diverged."""
    rows = records.read(path) if path.exists() else []
    return {
        trial_of(row): None if row.what == DIVERGED else row.config.get("valid", row.value)
        for row in rows
    }


def trial_of(row: Row) -> Trial:
    names = Trial.__dataclass_fields__
    return Trial(**{name: row.config[name] for name in names if name in row.config})


def spell(trial: Trial, value: float | None) -> str:
    """The value of a trial for readers."""
    unit = STUDIES[trial.study].unit
    if value is None:
        return "diverged"
    return f"{value:,.0f} tokens/s" if trial.is_timed else f"{value:.4f} {unit}"


def collect(folder: Path, path: Path) -> None:
    """Add the rows of runs that have ended to the file, each once, whoever was killed meanwhile."""
    done = results(path)
    found = [Row(**read_json(each)) for each in sorted(folder.glob(f"*/{ROW}"))]
    if new := {trial: row for row in found if (trial := trial_of(row)) not in done}:
        records.append(path, new.values())


@dataclass
class Running:
    """A run that a process works on."""

    work: Work
    process: BaseProcess
    began: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.work.trial.name

    def line(self) -> list[str]:
        """Its line of the live table."""
        trial, last = self.work.trial, _last_progress(self.work.out / LOG)
        cells = [trial.case, f"{trial.rate:g}", str(trial.seed)]
        if last is None:
            return [*cells, "begins", "", "", ""]
        steps = f"{last['step']:,}/{last['steps']:,}"
        bits, speed = f"{last['loss'] / math.log(2):.3f}", f"{last['tokens_per_second']:,.0f}"
        return [*cells, steps, bits, speed, duration(last["seconds_left"])]


HEADER = ["entry", "rate", "seed", "step", "bits", "tokens/s", "left"]


class Crew:
    """Processes that work on trials, so many at a time; whatever one does, others go on."""

    def __init__(self, options: Options, todo: Sequence[Trial]) -> None:
        self.options, self.device = options, resolved(options.device)
        self.has_gpu = self.device.startswith("cuda")
        self.jobs = options.jobs or (ON_GPU if self.has_gpu else ON_CPU)
        if options.stage == "speed":  # a run beside another would not tell its own speed
            self.jobs = 1
        self.waiting = [self._work(trial) for trial in todo]
        self.running: list[Running] = []
        self.failed: dict[str, str] = {}
        self.ended = 0
        self.total = len(todo)

    def work(self) -> None:
        """Until all is done or time is up; an interrupt, too, saves what runs."""
        minutes = self.options.minutes
        end = None if minutes is None else time.monotonic() + 60 * minutes
        screen = Screen()
        try:
            while self.waiting or self.running:
                if end is not None and time.monotonic() >= end:
                    break
                while self.waiting and len(self.running) < self.jobs:
                    self._start(self.waiting.pop(0))
                time.sleep(POLL)
                for each in [r for r in self.running if not r.process.is_alive()]:
                    self._ended(each)
                screen.show(self)
        finally:
            print(Screen.CLEAR, end="", flush=True)
            self._stop()
            collect(self.options.folder, self.options.rows_file)

    def _work(self, trial: Trial) -> Work:
        options, out = self.options, self.options.folder / trial.name
        without = out.with_name(out.name + ONE_BY_ONE)
        graph = options.graph and self.has_gpu and not without.exists()
        return Work(
            trial,
            without if self.has_gpu and not graph else out,
            data=options.data,
            device=self.device,
            graph=graph,
            compile=options.compile,
            threads=options.threads or max(1, (os.cpu_count() or 1) // self.jobs),
            jobs=self.jobs,
        )

    def _start(self, todo: Work) -> None:
        process = PROCESSES.Process(target=work, args=(todo,), name=todo.trial.name)
        process.start()
        self.running.append(Running(todo, process))

    def _ended(self, each: Running) -> None:
        """A run has ended by itself: its row is kept, or why there is none."""
        self.running.remove(each)
        each.process.join()
        todo = each.work
        if (todo.out / ROW).exists():
            self.ended += 1
            collect(self.options.folder, self.options.rows_file)
            value = results(self.options.rows_file).get(todo.trial)
            said = spell(todo.trial, value)
            took = duration(time.monotonic() - each.began)
            print(f"{Screen.CLEAR}{each.name}: {said} in {took}", flush=True)
        elif each.process.exitcode == UNRECORDED:
            print(f"{Screen.CLEAR}{each.name}: begun again without a CUDA graph", flush=True)
            without = todo.out.with_name(todo.out.name + ONE_BY_ONE)
            self.waiting.insert(0, replace(todo, graph=False, out=without))
        else:
            self.failed[each.name] = f"exit code {each.process.exitcode}, see {todo.printed}"

    def _stop(self) -> None:
        """Have running runs save themselves, and wait for it."""
        with _no_interrupts():
            for each in self.running:
                each.process.terminate()
            end = time.monotonic() + PATIENCE
            for each in self.running:
                each.process.join(max(0.0, end - time.monotonic()))
                if each.process.is_alive():
                    each.process.kill()
                    each.process.join()


class Screen:
    """The live table on a terminal; elsewhere a line from time to time."""

    CLEAR = "\r\x1b[J" if sys.stdout.isatty() else ""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._next = time.monotonic() + (0.0 if self.is_terminal else TOLD)

    def show(self, crew: Crew) -> None:
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


def table(crew: Crew, columns: int, rows: int) -> list[str]:
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
    count = f"{crew.ended} of {crew.total} ended, {len(crew.running)} run, {len(crew.waiting)} wait"
    return [line[: columns - 1] for line in [*shown, count]]


def _last_progress(log: Path) -> Mapping[str, Any] | None:
    """The last line of a log about steps; a line that is being written does not count."""
    if not log.exists():
        return None
    for line in reversed(log.read_bytes().splitlines()):
        with contextlib.suppress(ValueError):
            if "loss" in (found := json.loads(line)):
                return dict(found)
    return None


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """A second Ctrl-C or SIGTERM must not keep runs from being saved."""
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
