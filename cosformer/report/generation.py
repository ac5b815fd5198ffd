"""The table and the picture of tokens that many streams generate."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cosformer.records import Row
from cosformer.report.figures import OTHER_COLOURS, figure_bytes, lay_out, note
from cosformer.report.selection import LABELS, origin, rows_of, run_with
from cosformer.report.writing import Grid, Spell, cell_of, mebibytes, milliseconds, words

NAMES = {"transformers": "Transformers, Llama, static cache", "softmax": "softmax, static cache"}
"""Names of candidates for readers, where a table of many streams says more than others."""
COLUMNS: dict[str, tuple[str, Spell]] = {
    "generation_speed": ("tokens/s", "{:,.0f}".format),
    "token_time": ("ms for a token of all", milliseconds),
    "generation_speed_ratio": ("to softmax", "{:.1f} ×".format),
    "stream_memory": ("memory of a stream", mebibytes),
}
"""Quantity -> its name in the header, and how its numbers are written."""
RULE = (
    "A context is a prompt that was read; filled: positions set, and caches filled with random "
    "numbers. Where so many streams do not fit, softmax has fewer."
)
"""What the columns mean."""


def token_table(rows: Sequence[Row]) -> str:
    """Tokens a second of many streams, a line for each candidate, number of streams and context."""
    grid = token_grid(rows)
    return f"{grid.markdown}\n\n{RULE} {grid.title}."


def token_grid(rows: Sequence[Row]) -> Grid:
    """The newest run, in the order in which it was measured."""
    run = run_with(rows, "generation_speed")
    lines = []
    for row in (row for row in run if row.what in ("generation_speed", "failed")):
        c = row.config
        who, at = c["candidate"], {"batch": c["batch"], "position": c["position"]}
        read = "" if c.get("context", "read") == "read" else " (filled)"
        found = [cell_of(run, what, who, at, spell) for what, (_, spell) in COLUMNS.items()]
        place = words(_name(who), f"{c['batch']:,}", f"{c['position']:,}{read}")
        lines.append([*place, *found])
    header = ["model", "streams", "context", *(title for title, _ in COLUMNS.values())]
    first = rows_of(run, "generation_speed")[0]
    setting = f"decoder {first.config['preset']}, {first.config['dtype']}"
    return Grid(header, lines, origin(first, setting))


def generation_figure(rows: Sequence[Row], file_format: str) -> bytes:
    """Tokens a second, and memory of a stream, against the context.

    Of the number of streams that was measured in most contexts, or of as many as fitted there.
    """
    run = run_with(rows, "generation_speed")
    speeds = rows_of(run, "generation_speed")
    counts = Counter(row.config["batch"] for row in speeds)
    most = max(counts, key=lambda batch: (counts[batch], batch))
    fitting: dict[tuple[str, int], int] = {}
    for row in speeds:
        if (batch := row.config["batch"]) <= most:
            fitting[_cell(row)] = max(batch, fitting.get(_cell(row), 0))
    shown = [row for row in run if "batch" in row.config]
    shown = [row for row in shown if fitting.get(_cell(row)) == row.config["batch"]]
    panels = {
        "tokens/s": ("generation_speed", 1),
        "memory of a stream, MiB": ("stream_memory", 2**20),
    }

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2)
        for axis, (title, (what, unit)) in zip(axes, panels.items(), strict=True):
            found = [row for row in shown if row.what == what]
            names = dict.fromkeys(row.config["candidate"] for row in found)
            for name, colour in zip(names, ("#0b6e99", *OTHER_COLOURS), strict=False):
                mine = {_cell(row)[1]: row.value / unit for row in found if _cell(row)[0] == name}
                style = {"color": colour, "markersize": 4, "linewidth": 1.8}
                points = zip(*sorted(mine.items()), strict=True)
                axis.loglog(*points, "o-", label=_name(name), **style)
            axis.set_xlabel("tokens of context")
            lay_out(axis, title, (row.config["position"] for row in found))
        axes[0].legend(frameon=False, fontsize=8)
        setting = f"decoder {speeds[0].config['preset']}, {most} streams, or as many as fit"
        note(figure, origin(speeds[0], setting), 130)

    return figure_bytes(draw, (9.6, 4.2), file_format)


def _cell(row: Row) -> tuple[str, int]:
    return row.config["candidate"], row.config["position"]


def _name(who: str) -> str:
    return NAMES.get(who) or LABELS.get(who, who)
