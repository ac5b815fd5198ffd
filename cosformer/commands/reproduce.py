"""`cosformer reproduce TABLE`: a published table measured anew, several runs side by side."""

import dataclasses
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cosformer import records
from cosformer.commands import crew
from cosformer.commands.crew import Book, CrewOptions, Running
from cosformer.commands.crew_run import DIVERGED, FAILED, ROW
from cosformer.commands.crew_share import LOOK, Share, shared
from cosformer.commands.reproduce_run import described, work
from cosformer.commands.train import generate_sets
from cosformer.data import require_files
from cosformer.recipes import TABLES, TableRun, check_table, plan
from cosformer.tasks import arena, files
from cosformer.training import shown, write_json

POSITIONAL = "table"
WORDS = {
    "table": [*TABLES, "speed", "probes"],
    "only": [*dict.fromkeys(name for table in TABLES.values() for name in table.entries)],
    "columns": [*dict.fromkeys(name for table in TABLES.values() for name in table.columns)],
}


@dataclass(frozen=True)
class Options(CrewOptions):
    """Measure a published table anew: every mechanism learns every task of the table by one
    protocol, at three learning rates of which validation chooses one, then with further seeds.
    Every run that ends is one row, one that diverged or failed with its reason. Stopped at any
    moment, the same command goes on; so it does on another machine that has the folder of the runs
    and the rows.

    cosformer reproduce lra --minutes 8

    cosformer reproduce lra --columns listops image --only softmax cosformer cosformer-multiscale

    cosformer reproduce mlm --jobs 4

    cosformer reproduce lm --small
    """

    table: Literal["lra", "lra-pretrained", "lm", "mlm", "ablation"]
    """lra: Long-Range Arena; lra-pretrained: the same after pre-training on the inputs of each
    task; lm: words of WikiText-2 and bytes of enwik8; mlm: masked tokens of WikiText-2, then
    fine-tuning on sentences; ablation: feature maps, cosine and decay on bytes of enwik8 and on
    Long-Range Arena. Two more tables are no runs of this kind and have options of their own:
    cosformer reproduce speed --help, cosformer reproduce probes --help."""
    only: tuple[str, ...] = ()
    """Mechanisms (lines of the table) by name; all of them if not given."""
    columns: tuple[str, ...] = ()
    """Columns by name, as listops or enwik8; if not given, all of them whose data are there."""
    small: bool = False
    """Whether runs have a toy size, which tries a table out in minutes on two cores. Texts are then
    the source of a module of Python, and numbers mean nothing."""
    retry: bool = False
    """Whether runs that have failed are tried again. One that diverged is not."""
    data: str | None = None
    """Folder with the data sets (`cosformer data list`), the data folder if not given; for lm
    and ablation, also a text file in place of their texts: other columns are then left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_table(self.table, only=self.only, columns=self.columns)
        if self.data is None:
            return
        learns_text = self.table in ("lm", "ablation")
        path, kinds = Path(self.data), "a folder or a text file" if learns_text else "a folder"
        if not (path.is_dir() or (learns_text and path.is_file())):
            raise ValueError(f"data must be {kinds} for {self.table}, got {self.data}")

    @property
    def toy(self) -> str:
        return "small" if self.small else ""

    @property
    def book(self) -> Book[TableRun]:
        return self.book_of(f"reproduce-{self.table}", TableRun, self.data)


def run(options: Options) -> int:
    """0, also where time is up; 1 if runs have failed, or lack what they begin with. Of many
    processes the first tells."""
    share = shared()
    with shown(is_first=share.is_first):
        return _run(options, share)


def _run(options: Options, share: Share) -> int:
    book = options.book
    book.require()
    options = replace(options, columns=_columns(options))
    if share.is_first:
        book.collect()
    team = Crew(options, share)
    planned, later = team.planned()
    done = len(planned) - len(team.waiting) - len(team.bare)
    print(
        f"{options.table}: {len(planned) + later} runs, {done} done; "
        f"runs in {book.folder}, rows in {book.path}",
        flush=True,
    )
    first = {each.trial.column: each.trial for each in team.waiting}.values()
    share.after_first(lambda: _generate(first, options.data))
    team.work()
    share.failures({})  # which are rows; all have ended
    if not share.is_first:
        return 0
    team.collect()
    planned, later = team.planned()
    rows = book.rows()
    found = [rows[each] for each in planned if each in rows]
    failed = [row for row in found if row.what == FAILED]
    diverged = sum(row.what == DIVERGED for row in found)
    more = "; the same command goes on" if len(found) < len(planned) + later else ""
    print(
        f"{len(found)} of {len(planned) + later} runs have ended, {diverged} of them diverged, "
        f"{len(failed)} failed{more}"
    )
    for start in dict.fromkeys(each.start for each in team.bare):
        print(
            f"cosformer: reproduce: runs that begin with {start} are left out: "
            f"{book.folder / start} must have its checkpoint, which the machine that ran it has",
            file=sys.stderr,
        )
    for row in failed:
        name = book.trial_of(row).name
        print(f"cosformer: reproduce: {name} failed: {row.config['reason']}", file=sys.stderr)
    if failed:
        print("cosformer: reproduce: --retry tries what has failed again", file=sys.stderr)
    return 1 if failed or team.bare else 0


class Crew(crew.Crew[TableRun]):
    """Processes that work on runs of a table; what comes next depends on what has ended."""

    options: Options

    def __init__(self, options: Options, share: Share | None = None) -> None:
        book = options.book
        super().__init__(options, (), book=book, data=options.data, target=work, share=share)
        self._looked = time.monotonic()
        self.again = {t for t, row in book.rows().items() if options.retry and row.what == FAILED}
        """Runs that failed in an earlier call and have not failed again."""
        self.bare: list[TableRun] = []
        """Runs that begin with weights that are not here, though their row is."""
        self.more()

    def planned(self) -> tuple[list[TableRun], int]:
        """All runs of the table as far as they are known, and how many more there will be."""
        options = self.options
        found = plan(
            options.table,
            self._ended_runs(),
            only=options.only,
            columns=options.columns,
            size=options.toy or "full",
        )
        return found.runs, found.later

    def more(self) -> None:
        """Wait for what can be run now, in the order of the plan."""
        ended = self._ended_runs()
        runs, later = self.planned()
        at_work = {each.work.trial for each in self.running}
        known = {each.trial: each for each in self.waiting}
        left = [trial for trial in runs if trial not in ended and trial not in at_work]
        works = [known.get(trial) or self.work_on(trial) for trial in left]
        self.bare = [each.trial for each in works if not each.trial.can_begin(each.out)]
        hidden = {*self.elsewhere, *self.bare}
        self.waiting = [each for each in works if each.trial not in hidden]
        self.elsewhere &= set(left)
        self.total = len(self.took) + len(self.running) + len(left) + later

    def is_needed(self) -> bool:
        """Whether runs of other crews have yet to end, after which there may be more."""
        if not self.elsewhere:
            return False
        if time.monotonic() > self._looked + LOOK:
            self.more()
            self._looked = time.monotonic()
        # one that is tried again elsewhere, and fails again, does not come to an end here
        return bool(self.elsewhere - self.again or self.waiting)

    def lost(self, each: Running[TableRun], reason: str) -> None:
        """A run that has failed is a row with its reason."""
        todo = each.work
        lines = (
            todo.printed.read_text(errors="replace").split("\n") if todo.printed.exists() else []
        )
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        this = records.Run.begin(device=self.device, seed=todo.trial.seed)
        code = each.process.exitcode or 0
        told = f"{last} (exit code {code})" if code > 0 and last else f"exit code {code}"
        row = this.row(FAILED, code, "exit code", **described(todo), reason=told)
        write_json(todo.out / ROW, dataclasses.asdict(row))
        self.took.append(each.seconds)
        self.again.discard(todo.trial)
        self.collect()
        print(f"{crew.Screen.CLEAR}{each.name}: failed, {reason}", flush=True)

    def _ended_runs(self) -> dict[TableRun, float | None]:
        failed = {trial for trial, row in self.book.rows().items() if row.what == FAILED}
        again = self.again & failed
        return {trial: value for trial, value in self.book.results().items() if trial not in again}


def _columns(options: Options) -> tuple[str, ...]:
    """The columns whose data are there; an error for one that is named and lacks them."""
    known = TABLES[options.table].of_size(options.toy)
    if options.data is not None and Path(options.data).is_file():
        texts = [name for name, column in known.items() if column.data is not None]
        for name in options.columns:
            if name not in texts:
                raise ValueError(
                    f"columns must be of {', '.join(texts)} where data is a text file, got {name}"
                )
        return options.columns or tuple(texts)
    where, there = files.folder(options.data), list[str]()
    wanted = {*options.columns, *(known[name].start for name in options.columns)}
    for name, column in known.items():
        if options.columns and name not in wanted:
            continue
        try:
            if column.start and column.start not in there:
                raise ValueError(f"it begins with runs of {column.start}, which is left out")
            for each in column.needs:
                require_files(each, where)
            there.append(name)
        except ValueError as error:
            if options.columns:
                raise ValueError(
                    f"columns must be tasks whose data are there, got {name}: {error}"
                ) from None
            print(f"{name} is left out: {error}", flush=True)
    if not there:
        raise ValueError(f"data must have a task of {options.table}, got none in {where}")
    return tuple(there)


def _generate(runs: Iterable[TableRun], data: str | None) -> None:
    """Generate what the columns need, on all cores, before processes look for it."""
    for each in runs:
        if arena.sets_of(each.protocol.task, each.protocol.options):
            config = each.config(Path("unused"), data=data, device="cpu", graph=False)
            generate_sets(config)
