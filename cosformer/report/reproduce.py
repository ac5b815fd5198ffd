"""Published tables measured anew: ours at the rate that is best on validation, theirs below."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cosformer.records import Row
from cosformer.report.claims import CLAIMS, Score, beats_floor, claim_sentence, mean_score
from cosformer.report.selection import device_minutes, last_of_each, origin, other_commits
from cosformer.report.writing import MISSING, Cell, Grid, spread, told, words

LOST = ("diverged", "failed")
"""Quantities of runs that have no value; their rows say why."""
SIZES = ("layers", "width", "heads", "hidden", "dropout")
"""Fields of a model that the protocol of a column states."""
TRIAL = ("entry", "column", "rate", "seed", "size", "start")
"""What tells a run of a table from the others."""
PROTOCOL = ("task", "metric", "steps", "batch", "rates", "pretrain", "dtype", "text")
"""What all runs of a column must share to be compared."""
UNFINISHED = "*"
"""Stands after a number that more runs will change."""


class Shown(NamedTuple):
    """How a column is written."""

    title: str
    factor: float = 100.0
    """By which values are multiplied; 100 for shares that are written in %."""
    digits: int = 1
    lower: bool = False
    """Whether a lower value is better."""


class Published(NamedTuple):
    """A line of numbers that others have published."""

    name: str
    values: Sequence[str]
    """One for each column, with `MISSING` where there is none, and for the mean if there is one."""


class Reproduced(NamedTuple):
    """What a table has beside rows. A test holds it against the recipes."""

    entries: Sequence[str]
    columns: Mapping[str, Shown]
    unit: str
    mean: Sequence[str] = ()
    """Columns whose mean is the last column; none: there is no such column."""
    mean_title: str = "mean"
    mean_decides: bool = True
    """Whether the mean alone decides about the claim; if not, it is one column beside those that it
    is not made of."""
    published: Mapping[str, Published] = {}
    """Entry -> the line below its own."""
    others: Sequence[Published] = ()
    """Lines at the end."""
    is_recommended: bool = True
    """Whether each mechanism has what is recommended for it; if not, all have learned positions and
    nothing else."""
    remarks: str = ""
    """What a reader must know to compare, and where published numbers are from."""


def _line(name: str, values: str) -> Published:
    return Published(name, values.split())


_LRA = {
    "listops": Shown("ListOps"),
    "text": Shown("Text"),
    "retrieval": Shown("Retrieval"),
    "image": Shown("Image"),
    "pathfinder": Shown("Pathfinder"),
}
_ARENA = (
    "Floors: the most frequent class of ListOps is about 17 %, its root operator alone gives about "
    "36 %, with the digits right below it about 49 %. The pairs of Retrieval are real citations, "
    "but not the published pairs, so that its numbers are not comparable with published ones"
)
_ORIGINAL = "Tay et al. 2021"

REPRODUCED: dict[str, Reproduced] = {
    "lra": Reproduced(
        entries=(
            "softmax", "local", "sparse", "longformer", "linformer", "reformer", "sinkhorn",
            "synthesizer", "bigbird", "linear", "performer", "cosformer", "cosformer-multiscale",
        ),
        columns=_LRA,
        unit="right answers on test in %",
        mean=tuple(_LRA),
        published={
            "softmax": _line(_ORIGINAL, "36.37 64.27 57.46 42.44 71.40 54.39"),
            "local": _line(_ORIGINAL, "15.82 52.98 53.39 41.46 66.63 46.06"),
            "sparse": _line(_ORIGINAL, "17.07 63.58 59.59 44.24 71.71 51.24"),
            "longformer": _line(_ORIGINAL, "35.63 62.85 56.89 42.22 69.71 53.46"),
            "linformer": _line(_ORIGINAL, "35.70 53.94 52.27 38.56 76.34 51.36"),
            "reformer": _line(_ORIGINAL, "37.27 56.10 53.40 38.07 68.50 50.67"),
            "sinkhorn": _line(_ORIGINAL, "33.67 61.20 53.83 41.23 67.45 51.29"),
            "synthesizer": _line(_ORIGINAL, "36.99 61.68 54.67 41.61 69.45 52.88"),
            "bigbird": _line(_ORIGINAL, "36.05 64.02 59.29 40.83 74.87 55.01"),
            "linear": _line(_ORIGINAL, "16.13 65.90 53.09 42.34 75.30 50.55"),
            "performer": _line(_ORIGINAL, "18.01 65.40 53.82 42.77 77.05 51.41"),
            "cosformer": _line("Qin et al. 2022", "37.90 63.41 61.36 43.17 70.33 55.23"),
        },
        others=(
            _line("softmax, Chen et al. 2021", "38.37 61.95 80.69 40.57 65.26 57.37"),
            _line("cosFormer, re-run by its authors", "36.50 67.70 83.15 51.23 71.96 62.11"),
            _line("S4, Gu et al. 2022", "59.6 86.8 90.9 88.7 94.2 84.0"),
            _line("Mega, Ma et al. 2023", "63.1 90.4 91.3 90.4 96.0 86.2"),
        ),
        remarks=(
            f"{_ARENA}. Published lines are in italics. Tay et al. (Long-Range Arena) and Qin et "
            "al. (cosFormer) have larger models and their own steps; the sizes here are those of "
            "Chen et al. (Skyformer)"
        ),
    ),
    "lra-pretrained": Reproduced(
        entries=("softmax", "cosformer", "cosformer-multiscale", "hybrid"),
        columns=_LRA,
        unit="right answers on test in %",
        mean=tuple(_LRA),
        published={"softmax": _line("Amos et al. 2024", "59.75 89.27 88.64 74.22 88.45 80.1")},
        remarks=(
            f"{_ARENA}. Published lines are in italics. Amos et al. have larger models and longer "
            "runs. hybrid: one layer of cosformer-gated and one of softmax"
        ),
    ),
    "lm": Reproduced(
        entries=(
            "softmax", "linear", "rfa", "performer", "retention", "gated-delta", "cosformer",
            "cosformer-multiscale", "cosformer-gated", "hybrid",
        ),
        columns={
            "wikitext2": Shown("WikiText-2, perplexity of words", 1.0, 1, lower=True),
            "enwik8": Shown("enwik8, bits per byte", 1.0, 3, lower=True),
        },
        unit="on test",
        remarks=(
            "hybrid: one softmax layer, the fourth, among five of cosformer-gated. What is "
            "recommended was chosen by cosformer study on the last two million bytes of enwik8, "
            "which are among the five million that judge here. Published "
            "numbers are of WikiText-103, which has 50 times the words, and not comparable: "
            "perplexity on validation / test in Qin et al. 2022 cosFormer 23.5 / 23.1, softmax "
            "24.5 / 26.2, linear 28.7 / 30.2, RFA 25.8 / 27.5; in a later setting of the same "
            "group (44 M parameters) softmax 24.40 / 24.78, cosFormer 26.53 / 27.06, linear "
            "27.44 / 28.05, Performer 62.5 / 63.2"
        ),
    ),
    "mlm": Reproduced(
        entries=(
            "softmax", "linear", "performer", "longformer", "reformer", "cosformer",
            "cosformer-multiscale",
        ),
        columns={
            "masked": Shown("masked loss, nats", 1.0, 3, lower=True),
            "qqp": Shown("QQP"),
            "sst2": Shown("SST-2"),
            "mnli": Shown("MNLI"),
            "imdb": Shown("IMDB"),
            "amazon": Shown("Amazon"),
        },
        unit="loss on masked tokens of WikiText-2, then right answers after fine-tuning in %",
        mean=("qqp", "sst2", "mnli", "imdb", "amazon"),
        published={
            "softmax": _line("Qin et al. 2022", "– 88.41 92.31 79.15 92.86 75.79 85.70"),
            "linear": _line("Qin et al. 2022", "– – – – – – 78.00"),
            "performer": _line("Qin et al. 2022", "– – – – – – 56.28"),
            "longformer": _line("Qin et al. 2022", "– – – – – – 83.17"),
            "reformer": _line("Qin et al. 2022", "– – – – – – 52.77"),
            "cosformer": _line("Qin et al. 2022", "– 89.26 91.05 76.70 92.95 76.30 85.25"),
        },
        others=(_line("RFA, Qin et al. 2022", "– – – – – – 71.30"),),
        remarks=(
            "Published lines are in italics; they are of models of BERT's size, and their means "
            "alone are copied where – stands in their columns. QQP, MNLI and Amazon are parts of "
            "the published sets (7,600, 10,000 and 5,000 samples to learn from in all), and Amazon "
            "has five classes, so that these columns are not comparable with published ones"
        ),
    ),
    "ablation": Reproduced(
        entries=(
            "identity", "leaky-relu", "relu", "softmax", "relu-cosine", "relu-decay",
            "relu-cosine-decay",
        ),
        columns={
            "masked": Shown("masked bytes", 1.0, 3, lower=True),
            "causal": Shown("next byte", 1.0, 3, lower=True),
            **_LRA,
        },
        unit="loss on test in nats, bytes of enwik8; then right answers of Long-Range Arena in %",
        mean=tuple(_LRA),
        mean_title="LRA mean",
        mean_decides=False,
        is_recommended=False,
        remarks=(
            "relu-cosine is cosFormer as published; decay: a fixed one for each head, as "
            "cosformer-multiscale has; with both, the horizon of the cosine is the length. "
            "Published, validation loss of bidirectional pre-training (Qin et al. 2022): identity "
            "2.343, leaky relu 2.246, relu 1.993, softmax 1.915; mean of fine-tuning and of "
            "Long-Range Arena without cosine 85.12 and 54.20, with it 85.25 and 55.23. These are "
            "of other texts, tokens and sizes, and comparable in their order alone. "
            f"{_ARENA}"
        ),
    ),
}  # fmt: skip
"""Name of a table, as rows have it -> what it has beside rows. Published numbers are copied."""


def reproduced_table(rows: Sequence[Row]) -> str:
    """The table of its rows beside published numbers, its protocol, and why cells are empty."""
    name = str(rows[0].config.get("table"))
    if name not in REPRODUCED:
        kinds = sorted({row.what for row in rows})
        raise ValueError(f"a run must have rows of one of {', '.join(REPRODUCED)}, got {kinds}")
    about = [*protocol(name, rows), *reasons(name, rows)]
    return told([reproduced_grid(name, rows)], claim(name, rows), about, rule(name, rows))


def reproduced_grid(name: str, rows: Sequence[Row]) -> Grid:
    """Our lines, each above the published one. Cells without rows hold `MISSING`."""
    about, cells = REPRODUCED[name], _cells(name, rows)
    header = ["mechanism", *(style.title for style in about.columns.values())]
    header += [about.mean_title] if about.mean else []
    lines = [words("floor", *_floors(shown_rows(name, rows), about))]
    for entry in about.entries:
        mine = [cells[entry, column].cell for column in about.columns]
        lines.append([Cell(entry), *mine, *_mean(cells, entry, about)])
        if entry in about.published:
            lines.append(_published(about.published[entry]))
    lines += map(_published, about.others)
    return Grid(header, lines, f"{about.unit[0].upper()}{about.unit[1:]}")


def claim(name: str, rows: Sequence[Row]) -> str:
    """What the table says about the paper's claim."""
    about, scores = REPRODUCED[name], dict[str, dict[str, Score]]()
    titles = {column: _title(style) for column, style in about.columns.items()}
    for (entry, column), found in _cells(name, rows).items():
        if found.score is not None:
            scores.setdefault(entry, {})[titles[column]] = found.score
    lower = {titles[column]: style.lower for column, style in about.columns.items()}
    mean = [titles[column] for column in about.mean]
    if not about.mean_decides:
        lower = {title: low for title, low in lower.items() if title not in mean}
        lower[about.mean_title] = False
        for mine in scores.values():
            if all(title in mine for title in mean):
                mine[about.mean_title] = mean_score([mine[title] for title in mean])
        mean = []
    toy = "A toy size, whose numbers mean nothing. " if rows and not _full(rows) else ""
    said = claim_sentence(CLAIMS[name], scores, lower=lower, mean=mean)
    return toy + " ".join([said, *_unbeaten(name, rows)])


def protocol(name: str, rows: Sequence[Row]) -> list[str]:
    """What all mechanisms of a column have in common, a line for each column that was run."""
    parts = []
    for column, style in REPRODUCED[name].columns.items():
        shown = [row for row in shown_rows(name, rows) if row.config["column"] == column]
        found = [row for row in shown if row.what not in LOST]
        if not found:
            continue
        c = found[-1].config
        rates = ", ".join(f"{rate:g}" for rate in c["rates"])
        sizes = ", ".join(f"{name} {c['model'][name]}" for name in SIZES if name in c["model"])
        samples = " / ".join(f"{count:,}" for count in c["samples"].values())
        minutes = device_minutes(shown, "seconds")
        before = ", after as many of masked pre-training" if c["pretrain"] else ""
        before += ", from the best run on masked tokens" if c["start"] else ""
        parts.append(
            f"{_title(style)}: {c['steps']:,} steps of {c['batch']} sequences of up "
            f"to {c['length']:,} tokens{before}; rates {rates}; preset {c['preset']}"
            f"{f' with {sizes}' if sizes else ''}; {samples} samples to learn from, to choose by "
            f"and to judge by; floor: {c['floor_is']}{f'; {minutes}' if minutes else ''}"
        )
    return parts


def reasons(name: str, rows: Sequence[Row]) -> list[str]:
    """Why cells are empty or not final, a line each."""
    columns = REPRODUCED[name].columns
    said = [
        f"{_title(columns[column])}, {entry}: {found.cell.why}"
        for (entry, column), found in _cells(name, rows).items()
        if found.cell.why
    ]
    left = Counter(row.config["column"] for row in _last(name, rows))
    left.subtract(row.config["column"] for row in shown_rows(name, rows))
    said += [
        f"{_title(columns[column])}: runs by another protocol that are left out: {count}"
        for column, count in left.items()
        if count
    ]
    return said


def rule(name: str, rows: Sequence[Row]) -> str:
    """How a cell is made, what a reader must know to compare, and where rows are from."""
    about, shown = REPRODUCED[name], shown_rows(name, rows)
    equipment = (
        "each with the positions, convolution, norm and gate that are recommended for it"
        if about.is_recommended
        else "all with learned positions, and none with a convolution, a norm or a gate"
    )
    made = (
        f"One protocol for all mechanisms, {equipment}. All rates with one seed; the rate and the "
        "checkpoint that are best on validation are judged on test: mean ± standard deviation "
        f"(seeds). Padding is no data: no mechanism sees it. {MISSING}: no value, and a line "
        f"beside the table says why; not run where nothing is said. {UNFINISHED}: not all runs "
        f"have ended. {about.remarks}."
    )
    if not shown:
        return made
    newest = max(shown, key=lambda row: row.date)
    source = origin(newest, newest.config["dtype"]) + other_commits(newest, shown)
    return f"{made} {source}."


def _title(style: Shown) -> str:
    """The first words of a column's title."""
    return style.title.partition(",")[0]


class _Found(NamedTuple):
    """What rows say about one mechanism in one column of a published table."""

    cell: Cell
    score: Score | None
    beats: bool = True
    """Whether the number is better than the floor by more than chance."""


def _unbeaten(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Who is no better than the floor, a sentence for each column where somebody is not."""
    cells, about = _cells(name, rows), REPRODUCED[name]
    for column, style in about.columns.items():
        if failed := [entry for entry in about.entries if not cells[entry, column].beats]:
            yield f"No better than the floor of {_title(style)}: {', '.join(failed)}."


def shown_rows(name: str, rows: Sequence[Row]) -> list[Row]:
    """The last row of each run by the protocol of its column, of toys only where there is nothing
    else."""
    found = _last(name, rows)
    most = {column: _usual(found, column) for column in REPRODUCED[name].columns}
    return [row for row in found if _protocol(row) == most[row.config["column"]]]


def _last(name: str, rows: Sequence[Row]) -> list[Row]:
    """The last row of each run of the table."""
    mine = [row for row in rows if row.config.get("table") == name]
    return last_of_each(_full(mine) or mine, TRIAL)


def _full(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.config["size"] == "full"]


def _usual(rows: Sequence[Row], column: str) -> str | None:
    """The protocol that most runs of a column have."""
    found = Counter(_protocol(row) for row in rows if row.config["column"] == column)
    return max(found, key=lambda each: found[each]) if found else None


def _protocol(row: Row) -> str:
    return str([row.config.get(name) for name in PROTOCOL])


def _cells(name: str, rows: Sequence[Row]) -> dict[tuple[str, str], _Found]:
    about, shown = REPRODUCED[name], shown_rows(name, rows)
    return {
        (entry, column): _cell([r for r in shown if _place(r) == (entry, column)], style)
        for entry in about.entries
        for column, style in about.columns.items()
    }


def _place(row: Row) -> tuple[str, str]:
    return row.config["entry"], row.config["column"]


def _cell(rows: Sequence[Row], style: Shown) -> _Found:
    """All rates were tried with the first seed, and validation chooses one."""
    lost = [row for row in rows if row.what in LOST]
    judged = [row for row in rows if row.what not in LOST]
    why = "; ".join(
        f"{row.what} at rate {row.config['rate']:g}: {row.config['reason']}" for row in lost
    )
    if not judged:
        return _Found(Cell(MISSING, rows, why), None)
    first = min(row.config["seed"] for row in rows)
    sign = 1 if style.lower else -1
    tried = [row for row in judged if row.config["seed"] == first] or judged
    best = min(tried, key=lambda row: sign * row.config["valid"])
    chosen = [row for row in judged if row.config["rate"] == best.config["rate"]]
    at_rates = {row.config["rate"] for row in rows if row.config["seed"] == first}
    wanted_rates, wanted_seeds = len(best.config["rates"]), best.config["seeds"]
    missing = []
    if len(at_rates) < wanted_rates:
        missing.append(f"{len(at_rates)} of {wanted_rates} rates have ended")
    if len(chosen) < wanted_seeds:
        missing.append(f"{len(chosen)} of {wanted_seeds} seeds have a value")
    doubt = "not all runs have ended" if missing else ""
    values = [style.factor * row.value for row in chosen]
    score, text = Score.of(values, doubt), spread(values, style.digits)
    doubts = "; ".join(filter(None, [*missing, why]))
    c = best.config
    beats = beats_floor(
        score.mean / style.factor, c["floor"], samples=None if style.lower else c["samples"]["test"]
    )
    return _Found(Cell(text + (UNFINISHED if missing else ""), rows, doubts), score, beats)


def _mean(cells: Mapping[tuple[str, str], _Found], entry: str, about: Reproduced) -> list[Cell]:
    """The mean over columns, where all of them have a value; nothing for a table without means."""
    if not about.mean:
        return []
    found = [cells[entry, column] for column in about.mean]
    known = [each.score.mean for each in found if each.score is not None]
    if len(known) < len(found):
        return words(MISSING)
    is_final = not any(each.score.doubt for each in found if each.score is not None)
    text = f"{statistics.fmean(known):.1f}{'' if is_final else UNFINISHED}"
    return [Cell(text, [row for each in found for row in each.cell.rows])]


def _floors(rows: Sequence[Row], about: Reproduced) -> list[str]:
    """What a simple guess reaches on the test split of each column."""
    found = []
    for column, style in about.columns.items():
        floors = [
            row.config["floor"]
            for row in rows
            if row.config["column"] == column and "floor" in row.config
        ]
        found.append(f"{style.factor * floors[-1]:.{style.digits}f}" if floors else MISSING)
    return [*found, *([MISSING] if about.mean else [])]


def _published(line: Published) -> list[Cell]:
    return words(f"*{line.name}*", *(f"*{value}*" for value in line.values))
