"""Two runs side by side: their curves of loss, a table of their last values, and who won."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cosformer.records import Row
from cosformer.report.figures import OTHER_COLOURS, draw_grid, figure_bytes
from cosformer.report.writing import MISSING, Spell, mebibytes

NAMES = {"cosformer-gated": "cosFormer", "softmax": "softmax"}
"""The mechanisms of a demo and their names for readers: ours first."""
COLOURS = {"cosformer-gated": "#0b6e99", "softmax": "#c4501b"}
COLOURS_OF_RUNS = ("#0b6e99", *OTHER_COLOURS)
AXES = {"step": "steps", "seconds": "seconds of its own"}
"""What losses are drawn against."""
STYLES: dict[str, dict[str, Any]] = {
    "train_loss": {"label": "training", "linewidth": 0.9, "alpha": 0.45},
    "valid_loss": {"label": "validation", "linewidth": 1.8, "marker": "o", "markersize": 4},
}
"""How losses are drawn: those in training differ from batch to batch."""
LEVEL = 0.01
"""Losses that differ by a smaller share are level: another seed changes as much."""

ENOUGH = 1000
"""Steps from which on a difference tells who learns better: shorter runs go either way, by more
than longer ones (NOTES.md)."""
WORDS = {
    True: ("learns better than softmax", "learns as well as softmax", "learns worse than softmax"),
    False: tuple(
        f"is {place} softmax (too few steps to tell which one learns better)"
        for place in ("ahead of", "level with", "behind")
    ),
}
"""Whether a difference is settled -> words for a lower, a level and a higher loss."""


QUANTITIES: dict[str, tuple[str, Spell]] = {
    "train_loss": ("loss in training, nats", "{:.3f}".format),
    "valid_loss": ("loss on validation, nats", "{:.3f}".format),
    "valid_bits_per_byte": ("bits per byte", "{:.3f}".format),
    "train_speed": ("speed in training, tokens/s", "{:,.0f}".format),
    "peak_memory": ("memory of a step", mebibytes),
    "stream_memory": ("memory of a stream", mebibytes),
    "parameters": ("parameters", "{:,.0f}".format),
}
"""Quantity -> its name in the summary, and how its numbers are written."""


def summary(rows: Sequence[Row], task: str) -> list[list[str]]:
    """A header, then a line for each quantity: the last value of each mechanism."""
    lines = [["", *NAMES.values()]]
    for what, (title, spell) in QUANTITIES.items():
        if last := last_values(rows, task, what):
            cells = [spell(last[name].value) if name in last else MISSING for name in NAMES]
            lines.append([title, *cells])
    return lines


def last_values(rows: Sequence[Row], task: str, what: str) -> dict[str, Row]:
    """The last row of a quantity for each mechanism of a task."""
    mine = (row for row in rows if row.what == what and row.config.get("task") == task)
    return {row.config["candidate"]: row for row in mine}


def floor_sentence(rows: Sequence[Row], task: str) -> str:
    """The loss that must be beaten, and who does not beat it."""
    floor = _floor(rows, task)
    said = f"To beat: {floor.value:.3f} ({floor.config['floor_is']})."
    unbeaten = _who_failed(rows, task)
    return f"{said} {unbeaten} did not beat it." if unbeaten else said


def verdict(rows: Sequence[Row]) -> str:
    """Who learns better in short windows and who trains faster in long ones, in one sentence."""
    losses = last_values(rows, "short", "valid_loss")
    speeds = last_values(rows, "long", "train_speed")
    if len(losses) < len(NAMES) or len(speeds) < len(NAMES):
        return "The time was too short for a verdict."
    ours, theirs = (losses[name] for name in NAMES)
    more = ours.value / theirs.value - 1
    times = speeds[next(iter(NAMES))].value / speeds["softmax"].value
    joined = "and" if (more < LEVEL) == (times > 1) else "but"
    where, length = "below" if more < 0 else "above", speeds["softmax"].config["length"]
    unbeaten, step = _who_failed(rows, "short"), ours.config["step"]
    settled = not unbeaten and step >= ENOUGH
    order = 1 if abs(more) < LEVEL else 0 if more < 0 else 2
    learns = WORDS[settled][order]
    return (
        f"cosFormer {learns} {joined} trains {'faster' if times > 1 else 'slower'}: "
        f"after {step:,} steps of {ours.config['length']:,} tokens its loss on "
        f"validation is {ours.value:.3f}, {100 * abs(more):.1f} % {where} the {theirs.value:.3f} "
        f"of softmax, and in windows of {length:,} tokens it trains at {times:.2g} times the speed"
        + (f"; {unbeaten} did not beat the frequencies of single tokens." if unbeaten else ".")
    )


def _floor(rows: Sequence[Row], task: str) -> Row:
    return next(row for row in rows if row.what == "floor" and row.config["task"] == task)


def _who_failed(rows: Sequence[Row], task: str) -> str:
    """Names of the mechanisms whose loss is not below the floor."""
    losses, floor = last_values(rows, task, "valid_loss"), _floor(rows, task).value
    return " and ".join(NAMES[name] for name, row in losses.items() if row.value >= floor)


def learning_figure(rows: Sequence[Row], task: str, file_format: str) -> bytes:
    """Losses in training and on validation, against steps and against time."""
    mine = [row for row in rows if row.config.get("task") == task]
    if not any(row.what == "train_loss" for row in mine):
        raise ValueError(f"a curve needs rows of 'train_loss' of {task!r}, got none")

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(AXES), sharey=True)
        for axis, (key, title) in zip(axes, AXES.items(), strict=True):
            _draw_panel(axis, mine, key, title)
        axes[0].set_ylabel("loss, nats")

    return figure_bytes(draw, (9.6, 3.4), file_format)


class Curves(NamedTuple):
    """The losses of a run: steps, counted from 1, or seconds; and nats."""

    name: str
    train_loss: list[tuple[float, float]]
    valid_loss: list[tuple[float, float]]


def runs_figure(runs: Sequence[Curves], file_format: str) -> bytes:
    """Losses of runs against steps, a colour for each: training thin, validation with dots."""

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        # colours end before runs may: those that come after have other dashes
        looks = itertools.cycle(itertools.product(("-", "--", ":"), COLOURS_OF_RUNS))
        for run, (dashes, colour) in zip(runs, looks, strict=False):
            _draw_losses(axis, run, color=colour, linestyle=dashes)
        axis.set_xlabel("steps")
        axis.set_ylabel("loss, nats")
        draw_grid(axis)
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)

    return figure_bytes(draw, (7.2, 4.2 + 0.2 * len(runs)), file_format)


def _draw_panel(axis: Any, rows: Sequence[Row], key: str, title: str) -> None:
    for name, colour in COLOURS.items():
        mine = [row for row in rows if row.config.get("candidate") == name]
        losses = [[(r.config[key], r.value) for r in mine if r.what == what] for what in STYLES]
        _draw_losses(axis, Curves(NAMES[name], *losses), color=colour)
    axis.set_xlabel(title)
    draw_grid(axis)
    if key == "step":
        axis.legend(frameon=False, fontsize=8)


def _draw_losses(axis: Any, run: Curves, **look: str) -> None:
    """Losses in training, drawn thin, and those on validation, with dots."""
    for what, style in STYLES.items():
        if points := getattr(run, what):
            label = f"{run.name}, {style['label']}"
            axis.plot(*zip(*points, strict=True), **{**style, **look, "label": label})
