"""A study: a table of every entry at its best rate, beside softmax, and curves of the best."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from cosformer.records import Row
from cosformer.report.figures import OTHER_COLOURS, figure_bytes
from cosformer.report.selection import origin, other_commits, rows_of
from cosformer.report.training import mebibytes
from cosformer.report.writing import MISSING, markdown

UNITS = {"bits_per_byte": "bits per byte", "bits_per_masked_byte": "bits per masked byte"}
"""Quantity of a study's rows -> how a table calls it."""
COMPARED = "softmax"
"""The entry that others are compared with."""
DRAWN = 5
"""Entries that curves are drawn of, the best ones; softmax is drawn always."""


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
    return "\n\n".join([*parts, _explain(judged)])


def study_figure(rows: Sequence[Row], file_format: str) -> bytes:
    """Loss in training against tokens, and against seconds of the device for entries that were
    timed alone: the best entries of the longest runs of the full protocol."""
    judged = [row for row in rows if row.what in UNITS] or rows_of(rows, next(iter(UNITS)))
    full = [row for row in judged if row.config["scale"] == "full"] or judged
    size = max(map(_size, full))
    longest = [row for row in judged if _size(row) == size]
    names = dict.fromkeys(map(_entry, longest))
    best = sorted((_at_best_rate(longest, name)[0] for name in names), key=lambda row: row.value)
    drawn = [row for n, row in enumerate(best) if n < DRAWN or _entry(row) == COMPARED]
    timed = [row for row in rows if row.what == "train_speed" and _size(row)[:-1] == size[:-1]]
    speeds = {_entry(row): row.value for row in timed}
    scales: dict[str, dict[str, float]] = {"million tokens": {_entry(row): 1e6 for row in drawn}}
    if any(_entry(row) in speeds for row in drawn):
        scales["seconds of the device"] = speeds

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(scales), squeeze=False, sharey=True)[0]
        for axis, (title, scale) in zip(axes, scales.items(), strict=True):
            _draw_curves(axis, drawn, scale)
            axis.set_xlabel(title)
        axes[0].set_ylabel(f"{UNITS[judged[0].what]}, in training")
        axes[0].legend(frameon=False, fontsize=8)

    return figure_bytes(draw, (4.8 * len(scales), 3.4), file_format)


def _draw_curves(axis: Any, drawn: Sequence[Row], scale: dict[str, float]) -> None:
    """A curve of each entry; the number of tokens is divided by what `scale` has for it."""
    for row, colour in zip(drawn, OTHER_COLOURS, strict=False):
        name, c = _entry(row), row.config
        if name in scale:
            points = [(step * c["batch"] * c["length"], loss) for step, loss, _ in c["curve"]]
            along = [tokens / scale[name] for tokens, _ in points]
            axis.plot(along, [loss for _, loss in points], color=colour, label=name)
    axis.grid(color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)


def _table(judged: Sequence[Row], diverged: Sequence[Row], speeds: dict[str, Row]) -> str:
    rates = sorted({row.config["rate"] for row in (*judged, *diverged)})
    best = {name: _at_best_rate(judged, name) for name in dict.fromkeys(map(_entry, judged))}
    means = {name: statistics.fmean(row.value for row in each) for name, each in best.items()}
    header = ["entry", *(f"rate {rate:g}" for rate in rates), "mean of seeds", "− softmax"]
    header += ["first / last", "tokens/s", "state", "parameters"]
    lines = []
    for name in sorted(best, key=lambda name: means[name]):
        row = best[name][0]
        beyond = f"{means[name] - means[COMPARED]:+.3f}" if COMPARED in means else MISSING
        lines.append(
            [
                name,
                *_by_rate([*judged, *diverged], row, rates),
                _spread(best[name]),
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


def _size(row: Row) -> tuple[int, str, int]:
    """What runs must share to be compared; the number of steps is last."""
    c = row.config
    return c["length"], c["preset"], c["steps"]


def _spell(row: Row) -> str:
    c = row.config
    return f"{c['steps']:,} steps of {c['batch']} × {c['length']:,} tokens, preset {c['preset']}"


def _entry(row: Row) -> str:
    return str(row.config["entry"])


def _at_best_rate(judged: Sequence[Row], name: str) -> list[Row]:
    """The rows of an entry at its best rate, by seed; all rates were tried with the first seed."""
    mine = sorted((r for r in judged if _entry(r) == name), key=lambda r: r.config["seed"])
    first = min(
        (r for r in mine if r.config["seed"] == mine[0].config["seed"]), key=lambda r: r.value
    )
    return [row for row in mine if row.config["rate"] == first.config["rate"]]


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


def _spread(rows: Sequence[Row]) -> str:
    """The mean over seeds, their standard deviation and their number."""
    values = [row.value for row in rows]
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f} ({len(values)})"


def _mean(rows: Sequence[Row], name: str) -> str:
    return f"{statistics.fmean(row.config[name] for row in rows):.3f}"


def _speed(row: Row, alone: Row | None) -> str:
    """Of a run that had the device for itself, or in parentheses of one beside others."""
    if alone is not None:
        return f"{alone.value:,.0f}"
    speed = f"{row.config['tokens_per_second']:,.0f}"
    return speed if row.config["jobs"] == 1 else f"({speed})"


def _state(row: Row) -> str:
    """What a stream remembers after as many tokens as a sequence of training has."""
    found = row.config.get("stream_bytes", {}).get(str(row.config["length"]))
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
