"""A study: tables of every entry at its best rate, beside softmax, and curves of the best."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from cosformer.records import Row
from cosformer.report.figures import OTHER_COLOURS, draw_grid, figure_bytes
from cosformer.report.selection import origin, other_commits, rows_of
from cosformer.report.training import mebibytes
from cosformer.report.writing import MISSING, markdown

UNITS = {"bits_per_byte": "bits per byte", "bits_per_masked_byte": "bits per masked byte"}
"""Quantity of a study's rows -> how a table calls it."""
COMPARED = "softmax"
"""The entry that others are compared with."""
PAPER = "cosformer"
"""The entry that is cosFormer as published."""
LARGER = 1.1
"""How much larger than softmax's a model may be that is compared with it."""
FAR = (1, 2, 4, 8)
"""Positions, in lengths of training, up to which a table tells the loss in long sequences."""
DRAWN = 4
"""Entries that curves are drawn of, the best ones. Softmax is drawn always, and so is the best
entry without exact layers."""


def study_table(rows: Sequence[Row]) -> str:
    """A table for each size, the best entry first; all rates and seeds are in it."""
    judged = [row for row in rows if row.what in UNITS] or rows_of(rows, next(iter(UNITS)))
    unit = UNITS[judged[0].what]
    parts = []
    for size in sorted(set(map(_size, judged))):
        mine = [row for row in judged if _size(row) == size]
        diverged = [row for row in rows if row.what == "diverged" and _size(row) == size]
        alone = [r for r in rows if r.what == "train_speed" and _size(r)[:-1] == size[:-1]]
        found = _table(mine, diverged, {_entry(row): row for row in alone})
        parts.append(f"{_spell(mine[0])}, {unit} on validation:\n\n{found}")
        if far := _far_table(mine):
            span = f"the {size[0]:,} bytes up to a position"
            parts.append(f"The same models on longer sequences, {unit} of {span}:\n\n{far}")
    return "\n\n".join([*parts, _explain(judged)])


def probe_table(rows: Sequence[Row]) -> str:
    """Right answers of every entry on every probe; a table for each number of steps."""
    judged = rows_of(rows, "accuracy")
    parts = []
    for steps in sorted({row.config["steps"] for row in judged}):
        found = _answers([row for row in judged if row.config["steps"] == steps])
        parts.append(f"{steps:,} steps, right answers on test in %:\n\n{found}")
    newest = max(judged, key=lambda row: row.date)
    rule = (
        "Mean of seeds, with their standard deviation and number, at the rate that is best on "
        f"validation. {MISSING}: no run, none without divergence, or a limit of the mechanism "
        "below that length"
    )
    source = origin(newest, newest.config["dtype"]) + other_commits(newest, judged)
    return "\n\n".join([*parts, f"{rule}. {source}."])


def exact_table(rows: Sequence[Row]) -> str:
    """The best entry for every share of exact (softmax) layers, softmax as it is usual, and the
    paper's cosFormer; by the protocol that most entries were tried by. Models that are larger than
    softmax's by more than a tenth are left out."""
    judged = [row for row in rows if row.what in UNITS] or rows_of(rows, next(iter(UNITS)))
    sizes = Counter(map(_size, judged))
    judged = [row for row in judged if _size(row) == max(sizes, key=lambda size: sizes[size])]
    best = _by_entry(judged)
    compared, chosen = best.get(COMPARED), dict[Fraction, str]()
    most = math.inf if compared is None else LARGER * compared[0].config["parameters"]
    for name in sorted(best, key=lambda name: _loss(best[name][0])):  # by the seed that all have
        if best[name][0].config["parameters"] <= most:
            chosen.setdefault(_exact_layers(best[name][0]), name)
    names = [name for name in best if name in {*chosen.values(), COMPARED, PAPER}]
    length, far = judged[0].config["length"], max(map(int, judged[0].config["stream_bytes"]))
    header = ["exact layers", "entry", UNITS[judged[0].what], "− softmax"]
    header += [f"at {FAR[-1]} × the length", "parameters"]
    header += [f"stream of {n:,} tokens" for n in (length, far)]
    lines = []
    for name in names:
        (row, *_), values = best[name], [row.value for row in best[name]]
        exact = _exact_layers(row)
        beyond = MISSING
        if compared is not None and name != COMPARED:
            usual = statistics.fmean(row.value for row in compared)
            beyond = f"{statistics.fmean(values) - usual:+.3f}"
        some = f"{exact.numerator} of {exact.denominator}"
        share = "none" if not exact else "all" if exact == 1 else some
        size = f"{row.config['parameters'] / 1e6:.2f} M"
        cells = [share, name, _spread(values, 3), beyond, _at_far(best[name], FAR[-1]), size]
        lines.append([*cells, _state(row), _state(row, far)])
    shown = [row for name in names for row in best[name]]
    newest = max(shown, key=lambda row: row.date)
    told = (
        f"{_spell(newest)}, at the best of the rates that were tried: mean ± deviation (seeds). "
        f"At {FAR[-1]} × the length: of bytes that stand {FAR[-1] - 1} to {FAR[-1]} times as far "
        "from the start as a model has seen in training"
    )
    source = origin(newest, newest.config["text"]) + other_commits(newest, shown)
    return f"{markdown(header, lines)}\n\n{told}. {source}."


def study_figure(rows: Sequence[Row], file_format: str) -> bytes:
    """Loss in training against tokens, and against seconds of the device for entries that were
    timed alone; loss on validation by position. Of the longest runs of the full protocol: the best
    entries, softmax, and the best without exact layers."""
    judged = [row for row in rows if row.what in UNITS] or rows_of(rows, next(iter(UNITS)))
    full = [row for row in judged if row.config["scale"] == "full"] or judged
    size = max(map(_size, full))
    longest = [row for row in judged if _size(row) == size]
    best = sorted((each[0] for each in _by_entry(longest).values()), key=_loss)
    constant = next((row for row in best if COMPARED not in row.config["mechanism"]), None)
    drawn = [r for n, r in enumerate(best) if n < DRAWN or _entry(r) == COMPARED or r is constant]
    timed = [row for row in rows if row.what == "train_speed" and _size(row)[:-1] == size[:-1]]
    speeds = {_entry(row): row.value for row in timed}
    scales: dict[str, dict[str, float]] = {"million tokens": {_entry(row): 1e6 for row in drawn}}
    if any(_entry(row) in speeds for row in drawn):
        scales["seconds of the device"] = speeds

    def draw(figure: Any) -> None:
        *curves, last = figure.subplots(1, len(scales) + 1, squeeze=False)[0]
        for axis, (title, scale) in zip(curves, scales.items(), strict=True):
            _draw_curves(axis, drawn, scale)
            axis.set_xlabel(title)
            axis.set_ylim(0.97 * drawn[0].value, 1.6 * drawn[0].value)
        curves[0].set_ylabel(f"{UNITS[judged[0].what]}, in training")
        _draw_positions(last, drawn)
        last.legend(frameon=False, fontsize=8)

    return figure_bytes(draw, (4.8 * (len(scales) + 1), 3.4), file_format)


def _draw_curves(axis: Any, drawn: Sequence[Row], scale: dict[str, float]) -> None:
    """A curve of each entry; the number of tokens is divided by what `scale` has for it."""
    for row, colour in zip(drawn, OTHER_COLOURS, strict=False):
        name, c = _entry(row), row.config
        if name in scale:
            points = [(step * c["batch"] * c["length"], loss) for step, loss, _ in c["curve"]]
            along = [tokens / scale[name] for tokens, _ in points]
            axis.plot(along, [loss for _, loss in points], color=colour, label=name)
    draw_grid(axis)


def _draw_positions(axis: Any, drawn: Sequence[Row]) -> None:
    """Loss on validation by the position in a sequence: what a longer past is worth."""
    for row, colour in zip(drawn, OTHER_COLOURS, strict=False):
        c = row.config
        along = [(n + 0.5) * c["bin"] for n in range(len(c["by_position"]))]
        axis.plot(along, c["by_position"], color=colour, label=_entry(row))
    axis.set_xlabel("position")
    axis.set_ylabel(f"{UNITS[drawn[0].what]}, on validation")
    draw_grid(axis)


def _table(judged: Sequence[Row], diverged: Sequence[Row], speeds: dict[str, Row]) -> str:
    rates = sorted({row.config["rate"] for row in (*judged, *diverged)})
    best = _by_entry(judged)
    means = {name: statistics.fmean(row.value for row in each) for name, each in best.items()}
    header = ["entry", *(f"rate {rate:g}" for rate in rates), "mean of seeds", "− softmax"]
    header += ["first / last", "tokens/s", "state", "parameters"]
    lines = []
    for name in best:
        row = best[name][0]
        beyond = f"{means[name] - means[COMPARED]:+.3f}" if COMPARED in means else MISSING
        lines.append(
            [
                name,
                *_by_rate([*judged, *diverged], row, rates),
                _spread([row.value for row in best[name]], 3),
                MISSING if name == COMPARED else beyond,
                f"{_mean(best[name], 'first')} / {_mean(best[name], 'last')}",
                _speed(row, speeds.get(name)),
                _state(row),
                f"{row.config['parameters'] / 1e6:.2f} M",
            ]
        )
    lost = [name for name in dict.fromkeys(map(_entry, diverged)) if name not in best]
    lines += [[name, *["diverged"] * len(rates), *[MISSING] * 6] for name in lost]
    return markdown(header, lines)


def _far_table(judged: Sequence[Row]) -> str:
    """The loss by position beyond the length of training; empty where no row has it."""
    length, lines = judged[0].config["length"], []
    for name, rows in _by_entry(judged).items():
        if any(row.config.get("far") for row in rows):
            lines.append([name, *(_at_far(rows, n) for n in FAR)])
    header = ["entry", *(f"{n * length:,}" for n in FAR)]
    return markdown(header, lines) if lines else ""


def _at_far(rows: Sequence[Row], times: int) -> str:
    """The loss up to so many lengths of training, the mean of the rows that have it."""
    found = [row.config["far"][times - 1] for row in rows if row.config.get("far")]
    values = [value for value in found if value is not None]
    return f"{statistics.fmean(values):.3f}" if values else MISSING


def _answers(judged: Sequence[Row]) -> str:
    """Entries by probes, the entry with the most right answers first."""
    columns: dict[str, dict[str, list[float]]] = {}
    totals: dict[str, float] = {}
    for _, _, probe in sorted({_probe(row) for row in judged}):
        of_probe = _by_entry([row for row in judged if _probe(row)[-1] == probe])
        for name, rows in of_probe.items():
            totals[name] = totals.get(name, 0.0) + statistics.fmean(row.value for row in rows)
            for title, value in (pair for row in rows for pair in _by_length(row)):
                found = columns.setdefault(title, {})
                if value is not None:
                    found.setdefault(name, []).append(100 * value)
    lines = [
        [
            name,
            *(_spread(found[name], 1) if name in found else MISSING for found in columns.values()),
        ]
        for name in sorted(totals, key=lambda name: -totals[name])
    ]
    return markdown(["entry", *columns], lines)


def _by_length(row: Row) -> Iterator[tuple[str, float | None]]:
    """Title of a column -> right answers; None: the mechanism has a limit below that length."""
    probe, lengths = row.config["probe"], row.config.get("by_length")
    if lengths is None:
        yield probe, row.value
    else:
        yield from ((f"{probe}, {int(n):,} tokens", value) for n, value in lengths.items())


def _probe(row: Row) -> tuple[str, int, str]:
    """A probe, so that probes of one task are sorted by length."""
    c = row.config
    return c["task"], c["length"], c["probe"]


def _size(row: Row) -> tuple[int, str, int]:
    """What runs must share to be compared; the number of steps is last."""
    c = row.config
    return c["length"], c["preset"], c["steps"]


def _spell(row: Row) -> str:
    c = row.config
    return f"{c['steps']:,} steps of {c['batch']} × {c['length']:,} tokens, preset {c['preset']}"


def _entry(row: Row) -> str:
    return str(row.config["entry"])


def _loss(row: Row) -> float:
    """What is smaller for a better run, on validation."""
    c = row.config
    return -float(c["valid"]) if "valid" in c else row.value


def _by_entry(judged: Sequence[Row]) -> dict[str, list[Row]]:
    """Entry -> its rows at its best rate, by seed; the best entry first.

    All rates were tried with the first seed.
    """
    found = {}
    for name in dict.fromkeys(map(_entry, judged)):
        mine = sorted((r for r in judged if _entry(r) == name), key=lambda r: r.config["seed"])
        first = min((r for r in mine if r.config["seed"] == mine[0].config["seed"]), key=_loss)
        found[name] = [row for row in mine if row.config["rate"] == first.config["rate"]]
    return dict(sorted(found.items(), key=lambda item: statistics.fmean(map(_loss, item[1]))))


def _by_rate(rows: Sequence[Row], best: Row, rates: Sequence[float]) -> Iterator[str]:
    """What the first seed reached at each rate; the best is bold."""
    for rate in rates:
        at = {**best.config, "rate": rate}
        names = ("entry", "rate", "seed")
        found = [r for r in rows if all(r.config[name] == at[name] for name in names)]
        if not found:
            yield MISSING
        elif found[0].what == "diverged":
            yield "diverged"
        else:
            yield f"**{found[0].value:.3f}**" if found[0] is best else f"{found[0].value:.3f}"


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean over seeds, their standard deviation and their number."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)})"


def _mean(rows: Sequence[Row], name: str) -> str:
    return f"{statistics.fmean(row.config[name] for row in rows):.3f}"


def _speed(row: Row, alone: Row | None) -> str:
    """Of a run that had the device for itself, or in parentheses of one beside others."""
    if alone is not None:
        return f"{alone.value:,.0f}"
    speed = f"{row.config['tokens_per_second']:,.0f}"
    return speed if row.config["jobs"] == 1 else f"({speed})"


def _exact_layers(row: Row) -> Fraction:
    """The share of an entry's layers that are softmax."""
    names: list[str] = []
    for part in row.config["mechanism"].split():
        name, _, count = part.partition("*")
        names += [name] * int(count or 1)
    return Fraction(names.count(COMPARED), len(names))


def _state(row: Row, length: int | None = None) -> str:
    """What a stream remembers; after as many tokens as a sequence of training has by default."""
    found = row.config.get("stream_bytes", {}).get(str(length or row.config["length"]))
    return MISSING if found is None else mebibytes(sum(found.values()))


def _explain(judged: Sequence[Row]) -> str:
    newest = max(judged, key=lambda row: row.date)
    c = newest.config
    setting = f"{c['text']}, {c['dtype']}"
    first, last = c["bin"], 2 * c["bin"]
    return (
        "Rates: what the first seed reached. Mean of seeds: at the best rate, with their standard "
        f"deviation and number. First / last: mean over the first {first} and the last {last} "
        "positions of a sequence. Tokens/s: of training alone on the device, or in parentheses "
        "beside other runs. State: of a stream after as many tokens as a sequence has. "
        f"{origin(newest, setting)}{other_commits(newest, judged)}."
    )
