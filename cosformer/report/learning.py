"""Two runs side by side: their curves of loss, and a table of their last values."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cosformer.records import Row
from cosformer.report.figures import figure_bytes
from cosformer.report.selection import LABELS
from cosformer.report.training import mebibytes
from cosformer.report.writing import MISSING

COLOURS = {"cosformer": "#0b6e99", "softmax": "#c4501b"}
AXES = {"step": "steps", "seconds": "seconds of its own"}
"""What losses are drawn against."""


class Quantity(NamedTuple):
    """A line of the summary."""

    what: str
    title: str
    spell: Callable[[float], str]


QUANTITIES = (
    Quantity("train_loss", "loss in training, nats", "{:.3f}".format),
    Quantity("valid_loss", "loss on validation, nats", "{:.3f}".format),
    Quantity("valid_bits_per_byte", "bits per byte", "{:.3f}".format),
    Quantity("valid_accuracy", "share of right answers", "{:.1%}".format),
    Quantity("train_speed", "speed in training", "{:,.0f}".format),
    Quantity("peak_memory", "memory of a step", mebibytes),
    Quantity("stream_memory", "memory of a stream", mebibytes),
    Quantity("parameters", "parameters", "{:,.0f}".format),
)


def summary(rows: Sequence[Row], task: str) -> list[list[str]]:
    """A header, then a line for each quantity: the last value of each mechanism."""
    mine = [row for row in rows if row.config.get("task") == task]
    mine = [row for row in mine if "candidate" in row.config]
    names = list(dict.fromkeys(row.config["candidate"] for row in mine))
    lines = [["", *(LABELS[name] for name in names)]]
    for what, title, spell in QUANTITIES:
        last = {row.config["candidate"]: row for row in mine if row.what == what}
        if last:
            unit = next(iter(last.values())).unit
            title += f", {unit}" if what == "train_speed" else ""
            lines.append([title, *(spell(last[n].value) if n in last else MISSING for n in names)])
    return lines


def learning_figure(rows: Sequence[Row], task: str, file_format: str) -> bytes:
    """Loss in training against steps and against time; on validation as dots."""
    mine = [row for row in rows if row.config.get("task") == task]
    if not any(row.what == "train_loss" for row in mine):
        raise ValueError(f"a curve needs rows of 'train_loss' of {task!r}, got none")

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(AXES), sharey=True)
        for axis, (key, title) in zip(axes, AXES.items(), strict=True):
            _draw_panel(axis, mine, key, title)
        axes[0].set_ylabel("loss, nats")

    return figure_bytes(draw, (9.6, 3.4), file_format)


def _draw_panel(axis: Any, rows: Sequence[Row], key: str, title: str) -> None:
    for name, colour in COLOURS.items():
        for what, style in (("train_loss", "-"), ("valid_loss", "o")):
            points = [
                (row.config[key], row.value)
                for row in rows
                if row.what == what and row.config["candidate"] == name
            ]
            if points:
                label = LABELS[name] if what == "train_loss" else f"{LABELS[name]}, validation"
                axis.plot(*zip(*points, strict=True), style, color=colour, label=label)
    axis.set_xlabel(title)
    axis.grid(color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)
    if key == "step":
        axis.legend(frameon=False, fontsize=8)
