"""Published tables, measured anew: every entry of a table learns every column by one protocol.

`TABLES` says what stands in a table. A cell is searched the same way for all entries: the column's
rates with the first seed, judged on validation, then further seeds at the best rate.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cosformer.check import check_choice
from cosformer.recipes.protocols import Fields
from cosformer.recipes.setting import Setting
from cosformer.recipes.table import pretrained, recipe
from cosformer.training import (
    BEST,
    LAST,
    Budget,
    Evaluation,
    Objective,
    RunConfig,
    inheriting,
    load_config,
)

Size = Literal["full", "small"]
ONE_BY_ONE = "-one-by-one"
"""End of the folder's name of a run whose steps are not recorded."""
UNITS = {
    "accuracy": "accuracy",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "loss": "nats",
}
"""Metric -> its unit, as rows and lines of progress have it."""
MAIN = ("softmax", "cosformer", "cosformer-multiscale", "linear", "performer")
"""Mechanisms whose entries have all seeds of a column; the others have the first alone."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """What is learnt, and how long; all else is of the task's recipe for a GPU."""

    task: str
    """The task, which has a recipe."""
    metric: str = "accuracy"
    """What a run is judged by, a name of `UNITS`."""
    data: str | None = None
    """The name of a text, where the task learns one."""
    options: Fields = field(default_factory=dict)
    """Options of the task that differ from the recipe's."""
    needs: tuple[str, ...] = ()
    """Data sets that must lie in the data folder, as `cosformer data list` names them."""
    preset: str | None = None
    """Size of the model; None: the recipe's."""
    model: Fields = field(default_factory=dict)
    """Fields of the model that differ from the preset and are the same for all entries."""
    steps: int
    batch: int = 32
    """Sequences in a step."""
    judged: int = 10
    """How often a run is judged on validation."""
    batches: int | None = None
    """Batches of validation and test that judge; None: the whole splits."""
    rates: tuple[float, ...] = (1e-3, 3e-4, 3e-3)
    """Highest learning rates, the most promising first."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the best rate; every rate is tried with the first."""
    pretrain: Objective | None = None
    """What is learnt from the task's inputs first, for as many steps; None: nothing."""
    start: str = ""
    """The column whose best run this one begins with; empty: new weights."""
    bfloat16: bool = True

    @property
    def sign(self) -> int:
        """1 where a lower value is better, -1 where a higher one is."""
        return -1 if self.metric == "accuracy" else 1


class Table(NamedTuple):
    """A published table: its lines and its columns."""

    entries: Mapping[str, Fields]
    """Name -> fields of the model; what is not here is recommended for the mechanism."""
    columns: Mapping[str, Column]
    small: Mapping[str, Column]
    """The same columns at a size that ends in minutes on two cores; the numbers mean nothing."""

    def of_size(self, size: str) -> Mapping[str, Column]:
        return self.small if size == "small" else self.columns


_HYBRID = "cosformer-gated*3 softmax cosformer-gated*2"
_TINY: Fields = {"layers": 2, "width": 16, "heads": 2, "hidden": 32}
_FEW: dict[str, Fields] = {
    "listops": {"sizes": [40, 8, 8], "length": 600},
    "text": {"length": 64},
    "retrieval": {"length": 64},
    "pathfinder": {"sizes": [40, 8, 8]},
}
"""Column -> options of its task as a toy."""
_TEXT = os.__file__
"""A text that is on every machine, for toys that learn one: the source of Python's module os."""


def _named(*names: str) -> dict[str, Fields]:
    return {name: {"mechanism": name} for name in names}


def _table(entries: Mapping[str, Fields], columns: Mapping[str, Column]) -> Table:
    return Table(entries, columns, {name: _toy(name, each) for name, each in columns.items()})


def _toy(name: str, column: Column) -> Column:
    """The column with this name at its small size."""
    found = replace(
        column,
        steps=4,
        batch=4,
        judged=2,
        batches=2,
        rates=column.rates[:2],
        seeds=column.seeds[:2],
        model={**column.model, **_TINY},
        options={**column.options, **_FEW.get(name, {})},
        bfloat16=False,
    )
    if column.data is None:
        return found
    options = {**column.options, "length": 32}
    if "vocabulary" in options:
        options["vocabulary"] = 300
    model = {**found.model, "layers": 6}  # some entries are patterns of six layers
    return replace(found, data=_TEXT, needs=(), options=options, model=model)


_LRA = {
    "listops": Column(task="listops", steps=5_000),
    "text": Column(task="text", steps=10_000, needs=("imdb",)),
    "retrieval": Column(task="retrieval", steps=5_000, needs=("retrieval",)),
    "image": Column(task="image", steps=20_000, needs=("image",)),
    "pathfinder": Column(task="pathfinder", steps=20_000),
}
_PRETRAINED = {name: replace(column, pretrain="masked") for name, column in _LRA.items()}
_LM = {
    "wikitext2": Column(
        task="lm",
        metric="perplexity",
        data="wikitext2",
        options={"tokens": "words", "length": 512},
        needs=("wikitext2",),
        model={"dropout": 0.2},
        steps=1_500,
        rates=(1e-3, 3e-3, 3e-4),
    ),
    "enwik8": Column(
        task="lm",
        metric="bits_per_byte",
        data="enwik8",
        options={"length": 1_024},
        needs=("enwik8",),
        steps=1_500,
        judged=3,
        rates=(3e-3, 1e-3, 6e-3),
    ),
}
_MASKED = Column(
    task="mlm",
    metric="loss",
    data="wikitext2",
    options={"tokens": "bpe", "vocabulary": 8_192, "length": 256},
    needs=("wikitext2",),
    model={"dropout": 0.1},
    steps=10_000,
    judged=5,
    rates=(1e-3, 3e-3, 3e-4),
)
_FINE = Column(task="sst2", steps=2_000, start="masked", rates=(3e-4, 1e-4, 1e-3))
_MLM = {"masked": _MASKED} | {
    name: replace(_FINE, task=name, needs=(name,))
    for name in ("qqp", "sst2", "mnli", "imdb", "amazon")
}
_PLAIN: Fields = {"positions": "learned", "conv": 0, "norm": None, "gate": False}
"""What all lines of the ablation have alike, so that they differ by their weights alone."""
_ABLATION = {
    name: replace(_LM["enwik8"], task=task, metric="loss")
    for name, task in (("masked", "mlm"), ("causal", "lm"))
}

TABLES: dict[str, Table] = {
    "lra": _table(
        _named(
            "softmax", "local", "sparse", "longformer", "linformer", "reformer", "sinkhorn",
            "synthesizer", "bigbird", "linear", "performer", "cosformer", "cosformer-multiscale",
        ),
        _LRA,
    ),
    "lra-pretrained": _table(
        _named("softmax", "cosformer", "cosformer-multiscale")
        | {"hybrid": {"mechanism": "cosformer-gated softmax"}},
        _PRETRAINED,
    ),
    "lm": _table(
        _named(
            "softmax", "linear", "rfa", "performer", "retention", "gated-delta", "cosformer",
            "cosformer-multiscale", "cosformer-gated",
        )
        | {"hybrid": {"mechanism": _HYBRID}},
        _LM,
    ),
    "mlm": _table(
        _named(
            "softmax", "linear", "performer", "longformer", "reformer", "cosformer",
            "cosformer-multiscale",
        ),
        _MLM,
    ),
    "ablation": _table(
        {
            "identity": {"mechanism": "identity", **_PLAIN},
            "leaky-relu": {"mechanism": "leaky-relu", **_PLAIN},
            "relu": {"mechanism": "relu", **_PLAIN},
            "softmax": {"mechanism": "softmax", **_PLAIN},
            "relu-cosine": {"mechanism": "cosformer", **_PLAIN},
            "relu-decay": {
                "mechanism": "cosformer-multiscale", "options": {"horizon": math.inf}, **_PLAIN,
            },
            # its horizon is the length of the task, as that of cosFormer alone
            "relu-cosine-decay": {
                "mechanism": "cosformer", "options": {"decay": "multiscale"}, **_PLAIN,
            },
        },
        _ABLATION | _LRA,
    ),
}  # fmt: skip
"""Name -> the table. hybrid: one softmax layer, the last of two or the fourth of six."""


@dataclass(frozen=True)
class TableRun:
    """One run of a table, by what tells it from the others."""

    table: str
    entry: str
    column: str
    rate: float
    seed: int
    size: str = "full"
    start: str = ""
    """The name of the run whose weights it begins with; empty: new weights."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        size = "" if self.size == "full" else f"-{self.size}"
        return f"{self.case}-lr{self.rate:g}-seed{self.seed}{size}"

    @property
    def case(self) -> str:
        return f"{self.column}-{self.entry}"

    @property
    def protocol(self) -> Column:
        return TABLES[self.table].of_size(self.size)[self.column]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of all runs in this run's cell of the table."""
        return self.protocol.seeds if self.mechanism in MAIN else self.protocol.seeds[:1]

    @property
    def mechanism(self) -> str:
        return str(TABLES[self.table].entries[self.entry]["mechanism"])

    def described(self) -> dict[str, Any]:
        """What a row says of the run, so that a table of rows can state its protocol."""
        p = self.protocol
        return {
            **vars(self),
            "mechanism": self.mechanism,
            "task": p.task,
            "metric": p.metric,
            "steps": p.steps,
            "batch": p.batch,
            "rates": list(p.rates),
            "seeds": len(self.seeds),
            "pretrain": p.pretrain,
            "dtype": "bfloat16" if p.bfloat16 else "float32",
        }

    def can_begin(self, out: Path) -> bool:
        """Whether the weights that it begins with are there; `out`: its own folder."""
        if not self.start or (out / LAST).exists():
            return True
        start = _start(self.start, out)
        return (start / BEST).is_file() or (start / LAST).is_file()

    def spell(self, value: float | None) -> str:
        """The value on validation for readers; None: the run diverged or failed."""
        if value is None:
            return "no value"
        return f"{value:.4f} {UNITS[self.protocol.metric]} on validation"

    def config(
        self, out: Path, *, data: str | None, device: str, graph: bool, compile: bool | None = None
    ) -> RunConfig:
        """`data`: None for the data folder; a text file in place of the column's text."""
        p = self.protocol
        fields = TABLES[self.table].entries[self.entry]
        # a recipe gives a CPU less to do, and a protocol is one everywhere
        where = Setting("cuda", data or p.data, self.mechanism, p.pretrain)
        found = recipe(p.task, where)
        found = replace(
            found,
            task=replace(found.task, options={**found.task.options, **p.options}),
            out=out,
            preset=p.preset or found.preset,
            model={**found.model, **fields, **p.model},
            optimiser=replace(found.optimiser, lr=self.rate),
            budget=Budget(steps=p.steps, batch=p.batch),
            evaluation=Evaluation(every=max(1, p.steps // p.judged), batches=p.batches),
            precision="bfloat16" if p.bfloat16 else "float32",
            graph=graph,
            compile=compile,
            seed=self.seed,
            device=device,
            log_every=max(1, p.steps // 100),
        )
        if p.pretrain is not None:
            found = pretrained(found, p.pretrain)
        if self.start:
            found = replace(found, start=_start(self.start, out))
            found = inheriting(found, found)
        return found


Ended = Mapping[TableRun, float | None]
"""Runs that have ended -> their value on validation; None: the run diverged or failed."""


class Plan(NamedTuple):
    """The runs of a table."""

    runs: list[TableRun]
    """In the order in which they are run, those that have ended as well."""
    later: int
    """How many more there will be, whose rate or start is not known yet."""


def check_table(table: str, *, only: Iterable[str] = (), columns: Iterable[str] = ()) -> None:
    """Refuse an entry or a column that the table does not have."""
    check_choice("table", table, TABLES)
    for name in only:
        check_choice("only", name, TABLES[table].entries)
    for name in columns:
        check_choice("columns", name, TABLES[table].columns)


def plan(
    table: str,
    ended: Ended,
    *,
    only: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    size: str = "full",
) -> Plan:
    """Column by column: all entries at the first rate, at the others, then with further seeds.

    `only` and `columns`: by name; all of them if none is given. A cell all of whose rates have
    diverged or failed has no further seeds, and a column that starts from it no runs.
    """
    check_table(table, only=only, columns=columns)
    runs, later = list[TableRun](), 0
    for column in columns or TABLES[table].columns:
        found = list[tuple[int, int, TableRun]]()
        for entry in only or TABLES[table].entries:
            cell = _cell(TableRun(table, entry, column, 0.0, 0, size), ended)
            later += cell.later
            rates = cell.runs[0].protocol.rates if cell.runs else ()
            found += [(run.seeds.index(run.seed), rates.index(run.rate), run) for run in cell.runs]
        runs += [run for *_, run in sorted(found, key=lambda each: each[:2])]
    return Plan(runs, later)


def best_of(run: TableRun, ended: Ended) -> TableRun | None:
    """The best run of a cell with the first seed; None before all rates have ended, or if no run
    of them has a value. `run`: any run of the cell."""
    tried = _tried(run, ended)
    if not tried or not all(each in ended for each in tried):
        return None
    sign = run.protocol.sign
    values = [(sign * value, each) for each in tried if (value := ended[each]) is not None]
    return min(values, key=lambda pair: pair[0])[1] if values else None


def _tried(run: TableRun, ended: Ended) -> list[TableRun]:
    """The cell's runs at all rates; none as long as it is not known what they start from."""
    start = run.protocol.start
    if start:
        before = best_of(replace(run, column=start, start=""), ended)
        if before is None:
            return []
        run = replace(run, start=before.name)
    return [replace(run, rate=rate, seed=run.seeds[0]) for rate in run.protocol.rates]


def _cell(run: TableRun, ended: Ended) -> Plan:
    seeds = run.seeds
    tried = _tried(run, ended)
    if not tried:
        before = replace(run, column=run.protocol.start, start="")
        is_lost = all(each in ended for each in _tried(before, ended))
        return Plan([], 0 if is_lost else len(run.protocol.rates) + len(seeds) - 1)
    best = best_of(run, ended)
    if best is None:
        is_lost = all(each in ended for each in tried)
        return Plan(tried, 0 if is_lost else len(seeds) - 1)
    return Plan([*tried, *(replace(best, seed=seed) for seed in seeds[1:])], 0)


def _start(name: str, out: Path) -> Path:
    """The folder of the run that the one in `out` begins with, by its name.

    A run that has a checkpoint goes on with the path it began with, wherever both are now.
    """
    if (out / LAST).exists() and (before := load_config(out).start) is not None:
        return before
    without = out.parent / f"{name}{ONE_BY_ONE}"
    return without if without.exists() else out.parent / name
