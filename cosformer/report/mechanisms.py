"""Every mechanism against the length: a table of growth and cost, and a panel for each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cosformer.records import Row, growth_exponent
from cosformer.report.claims import speed_sentence
from cosformer.report.figures import draw_grid, figure_bytes, note, short
from cosformer.report.selection import Times, candidates, describe, runs_of_each, times
from cosformer.report.writing import MISSING, Cell, Grid, Spell, cell_of, markdown, milliseconds

REFERENCES = {"cosformer": "#0b6e99", "softmax": "#c4501b"}
"""Mechanisms that every panel shows, with their colours."""
COLUMNS = 8
LENGTHS = (1024, 2048, 4096, 16384, 65536)
"""Lengths of the paper's table of speed, as far as they are measured, and longer ones."""


def mechanism_table(rows: Sequence[Row]) -> str:
    """Growth of time and memory, and what one length costs, a line for each mechanism."""
    run = runs_of_each(rows, "time")
    length = max(row.config["length"] for row in run if row.what == "time")
    header = ["mechanism", "growth of time", "of memory"]
    header += [f"forward, {length:,} tokens", "forward + backward", "peak memory, × (q + k + v)"]
    found, host = _alone(run)
    lines = [_line(run, name, length, found.get(name, {})) for name in _names(run)]
    explained = (
        f"Growth: the exponent p of length^p, forward + backward{host}, from 4,096 tokens. "
        "Milliseconds; causal where a mechanism can be, else full (marked *)"
    )
    return f"{markdown(header, lines)}\n\n{length_claim(rows)}\n\n{explained}. {describe(run)}."


def length_grid(rows: Sequence[Row]) -> Grid:
    """Milliseconds of both passes by length, and memory at the longest, a line for each."""
    run = runs_of_each(rows, "time")
    measured = {row.config["length"] for row in run if row.what == "time"}
    lengths = [length for length in LENGTHS if length in measured] or sorted(measured)
    header = ["mechanism", *(f"{length:,} tokens" for length in lengths)]
    header.append(f"peak memory at {lengths[-1]:,}, × (q + k + v)")
    lines = [
        [
            Cell(name),
            *(_cell(run, "time", name, n, "forward_backward", milliseconds) for n in lengths),
            _cell(run, "peak_memory", name, lengths[-1], "forward_backward", "{:.1f}".format),
        ]
        for name in _names(run)
    ]
    machine = run[0].hardware["name"]
    return Grid(header, lines, f"Milliseconds of forward + backward for the caller, {machine}")


def length_claim(rows: Sequence[Row]) -> str:
    """What times by length say about linear time."""
    run = runs_of_each(rows, "time")
    alone, _ = _alone(run)
    grown = {name: _growth_of_time(run, name, alone.get(name, {})) for name in REFERENCES}
    known = {name: growth for name, growth in grown.items() if growth is not None}
    return speed_sentence(times(run, "forward_backward"), known, *REFERENCES)


def mechanism_figure(rows: Sequence[Row], file_format: str) -> bytes:
    """Forward + backward against length, a panel for each, beside cosFormer and softmax."""
    run = runs_of_each(rows, "time")
    found, host = _alone(run)
    names = [name for name in _names(run) if name in found]
    names = [name for name in names if name not in REFERENCES] or names
    lines = math.ceil(len(names) / COLUMNS)

    def draw(figure: Any) -> None:
        axes = figure.subplots(lines, COLUMNS, squeeze=False, sharex=True, sharey=True).flatten()
        for axis, name in zip(axes, names, strict=False):
            _draw_panel(axis, name, found, _growth_of_time(run, name, found[name]))
        for axis in axes[len(names) :]:
            axis.set_axis_off()
        handles = [axes[0].lines[n] for n in range(len(axes[0].lines) - 1)]
        figure.legend(handles, [h.get_label() for h in handles], loc="outside upper right",
                      ncols=2, frameon=False)  # fmt: skip
        figure.supylabel(f"milliseconds, forward + backward{host}", fontsize=10, color="#333333")
        note(figure, f"tokens. {describe(run)}", 25 * COLUMNS)

    return figure_bytes(draw, (1.75 * COLUMNS, 1.6 * lines + 0.6), file_format)


def _draw_panel(axis: Any, name: str, found: Times, growth: float | None) -> None:
    for reference, colour in REFERENCES.items():
        if reference in found and reference != name:
            points = sorted(found[reference].items())
            axis.loglog(*zip(*points, strict=True), color=colour, linewidth=1, label=reference)
    points = sorted(found[name].items())
    axis.loglog(*zip(*points, strict=True), "o-", color="#222222", markersize=2.5, linewidth=1.6)
    axis.set_title(name, loc="left", fontsize=9)
    if growth is not None:
        place = {"xycoords": "axes fraction", "fontsize": 8, "color": "#555555"}
        axis.annotate(f"n^{growth:.2f}", (0.05, 0.86), **place)
    draw_grid(axis)
    axis.minorticks_off()
    lengths = sorted({length for by_length in found.values() for length in by_length})
    ticks = lengths[:: max(1, (len(lengths) - 1) // 2)]  # the first, one between, the last
    axis.set_xticks(ticks, [short(tick) for tick in ticks])


def _line(run: Sequence[Row], name: str, length: int, alone: Mapping[int, float]) -> list[str]:
    refused = any(row.what == "failed" and _of(row, name) and row.config.get("causal")
                  and "length" not in row.config for row in run)  # fmt: skip
    cells = [f"{name} *" if refused else name]
    memory = _growth(run, "memory_growth_exponent", name)
    for growth in (_growth_of_time(run, name, alone), memory and memory.value):
        cells.append(MISSING if growth is None else f"{growth:.2f}")
    for pass_name in ("forward", "forward_backward"):
        cells.append(_cell(run, "time", name, length, pass_name, milliseconds).text)
    last = _cell(run, "peak_memory", name, length, "forward_backward", "{:.1f}".format)
    cells.append(last.text)
    return cells


def _cell(
    run: Sequence[Row], what: str, name: str, length: int, pass_name: str, spell: Spell
) -> Cell:
    return cell_of(run, what, name, {"length": length, "pass": pass_name}, spell)


def _alone(run: Sequence[Row]) -> tuple[Times, str]:
    """Times of both passes, without the host where a GPU has recorded them; and words for that."""
    recorded = times(run, "forward_backward", "time_graph")
    return times(run, "forward_backward") | recorded, ", without the host" * bool(recorded)


def _growth_of_time(run: Sequence[Row], name: str, alone: Mapping[int, float]) -> float | None:
    row = _growth(run, "growth_exponent", name)
    if row is None:
        return None
    between = range(row.config["from"], row.config["to"] + 1)
    found = {length: x for length, x in alone.items() if length in between}
    return growth_exponent(found) if len(found) > 1 else row.value


def _growth(run: Sequence[Row], what: str, name: str) -> Row | None:
    for row in run:
        if row.what == what and _of(row, name) and row.config["pass"] == "forward_backward":
            return row
    return None


def _names(run: Sequence[Row]) -> list[str]:
    """In the order of the rows, flash-linear-attention's at the end."""
    return sorted(candidates(run), key=lambda name: name.startswith("fla-"))


def _of(row: Row, name: str) -> bool:
    return row.config.get("candidate") == name
