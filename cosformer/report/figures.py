"""Figures of measured rows. Matplotlib is loaded on first use."""

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cosformer.records import Row
from cosformer.report.selection import (
    PASSES,
    Times,
    crossover,
    describe,
    label,
    plain,
    run_with,
    times,
    token_times,
    two_digits,
)

COLOURS = {"chunked": "#0b6e99", "sdpa": "#c4501b", "reference": "#8a8f98", "auto": "#08415c"}
OTHER_COLOURS = ("#c4501b", "#e08e45", "#4b7f52", "#7b5ea7", "#b08900", "#5c5c5c")
MOST_NAMES_INSIDE = 3
"""The most names that a legend inside a panel has room for."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "cosformer",  # the same rows give the same file
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}


def time_vs_length(rows: Sequence[Row], file_format: str) -> bytes:
    """Time against length in log-log, a panel for each pass, the crossover marked."""
    return _draw(run_with(plain(rows), "time"), times, "milliseconds", file_format)


def token_time_vs_length(rows: Sequence[Row], file_format: str) -> bytes:
    """Time per token against length, where batches differ. A level line is linear time."""
    run = run_with(plain(rows), "time")
    return _draw(run, token_times, "nanoseconds per token, causal", file_format)


def _draw(
    run: Sequence[Row], select: Callable[[Sequence[Row], str], Times], unit: str, file_format: str
) -> bytes:
    panels = {name: found for name in PASSES if (found := select(run, name))}
    if not panels:
        raise ValueError("time_vs_length needs rows of 'time', got none that it draws")
    width = max(6.0, 4.8 * len(panels))

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (pass_name, found) in zip(axes, panels.items(), strict=True):
            _draw_panel(axis, found, PASSES[pass_name])
        axes[0].set_ylabel(unit)
        _name_lines(figure, axes)
        note(figure, describe(run), int(15 * width))

    return figure_bytes(draw, (width, 4.2), file_format)


def draw_grid(axis: Any) -> None:
    """Light lines behind the curves."""
    axis.grid(which="major", color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)


def lay_out(axis: Any, title: str, lengths: Iterable[int]) -> None:
    """A panel of numbers against lengths: its title, its grid, and a tick for each length."""
    axis.set_title(title, loc="left", fontsize=11)
    draw_grid(axis)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:,g}")
    ticks = sorted(set(lengths))
    axis.set_xticks(ticks, [short(tick) for tick in ticks])


def note(figure: Any, text: str, width: int) -> None:
    """Small words below a figure, in lines of so many letters."""
    figure.supxlabel(textwrap.fill(text, width), fontsize=7, color="#777777")


def figure_bytes(draw: Callable[[Any], None], size: tuple[float, float], file_format: str) -> bytes:
    """A figure that `draw` fills, as a file; the same rows give the same one."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        dateless = {"Date": None, "Creator": None} if file_format == "svg" else None
        figure.savefig(buffer, format=file_format, dpi=150, facecolor="white", metadata=dateless)
    return buffer.getvalue()


def _draw_panel(axis: Any, found: Times, title: str) -> None:
    spare = iter(OTHER_COLOURS * len(found))
    for candidate, by_length in found.items():
        lengths = sorted(by_length)
        values = [by_length[length] for length in lengths]
        colour = COLOURS.get(candidate) or next(spare)
        name = label(candidate, found)
        axis.loglog(lengths, values, "o-", color=colour, label=name, markersize=4, linewidth=1.8)
    axis.set_xlabel("tokens")
    lay_out(axis, title, (length for by_length in found.values() for length in by_length))
    if {"chunked", "sdpa"} <= found.keys():
        _mark_crossover(axis, found)


def _name_lines(figure: Any, axes: Sequence[Any]) -> None:
    """A legend in every panel, or one beside them where it would hide the lines."""
    lines, names = axes[0].get_legend_handles_labels()
    if len(names) > MOST_NAMES_INSIDE:
        figure.legend(lines, names, frameon=False, loc="outside right center")
        return
    for axis in axes:
        axis.legend(frameon=False, loc="upper left")


def _mark_crossover(axis: Any, found: Times) -> None:
    length = crossover(found["chunked"], found["sdpa"])
    if not length:
        return
    axis.axvline(length, ymax=0.78, color="#555555", linewidth=1, linestyle=(0, (4, 3)))
    axis.annotate(
        f"faster from ≈ {two_digits(length):,}",
        (length, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        color="#555555",
        fontsize=9,
    )


def short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
