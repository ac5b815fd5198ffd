"""A table of times by cell, for runs in which more than the length differs."""

from collections import Counter
from collections.abc import Callable, Sequence

from cosformer.records import Row
from cosformer.report.selection import PASSES, Cell, cell, label, origin
from cosformer.report.writing import MISSING, markdown, milliseconds

Values = dict[tuple[str, str, Cell], float]
"""Candidate, pass, cell -> value."""

EXPLANATION = (
    "Milliseconds as the caller sees them, forward / forward + backward. × floor: the time of the "
    "first without the host, over that of moving q, k, v and the output once (three times that "
    "with the backward pass) at the speed of a copy"
)


def cell_table(rows: Sequence[Row]) -> str:
    """Milliseconds by cell and candidate, a table for causal and one for full attention."""
    shown, parts = _by_line(rows), []
    for causal, title in ((True, "Causal"), (False, "Full")):
        lines = [row for row in shown if row.config["causal"] == causal]
        if lines:
            parts.append(f"{title} attention:\n\n{_table(lines)}")
    newest_first = sorted(shown, key=lambda row: row.date, reverse=True)
    origins = dict.fromkeys(origin(row, row.config["dtype"]) for row in newest_first)
    return "\n\n".join([*parts, f"{EXPLANATION}. {'. '.join(origins)}."])


def _by_line(rows: Sequence[Row]) -> list[Row]:
    """Each line of a table from the run that has most numbers for it, the newest of several."""
    counts: dict[tuple[Cell, bool], Counter[str]] = {}
    for row in rows:
        if row.what == "time":
            counts.setdefault((cell(row), row.config["causal"]), Counter())[row.date] += 1
    dates = {where: max(c, key=lambda date: (c[date], date)) for where, c in counts.items()}
    of_lines = [row for row in rows if row.what in ("time", "floor_ratio")]
    return [row for row in of_lines if row.date == dates[cell(row), row.config["causal"]]]


def _table(rows: Sequence[Row]) -> str:
    times, ratios = _values(rows, "time"), _values(rows, "floor_ratio")
    candidates = list(dict.fromkeys(candidate for candidate, _, _ in times))
    cells = sorted({where for _, _, where in times}, key=lambda where: (where[3], where[2]))
    first, *others = candidates
    header = ["batch × heads × tokens × width", label(first, candidates), "× floor"]
    header += [label(candidate, candidates) for candidate in others]
    lines = []
    for where in cells:
        line = [" × ".join(f"{size:,}" for size in where)]
        line += [_pair(times, first, where, milliseconds)]
        line += [_pair(ratios, first, where, "{:.1f}".format)]
        line += [_pair(times, candidate, where, milliseconds) for candidate in others]
        lines.append(line)
    return markdown(header, lines)


def _values(rows: Sequence[Row], what: str) -> Values:
    return {
        (row.config["candidate"], row.config["pass"], cell(row)): row.value
        for row in rows
        if row.what == what
    }


def _pair(values: Values, candidate: str, where: Cell, spell: Callable[[float], str]) -> str:
    """Both passes of a candidate, or one dash where there is neither."""
    found = [values.get((candidate, pass_name, where)) for pass_name in PASSES]
    if not any(found):
        return MISSING
    return " / ".join(MISSING if value is None else spell(value) for value in found)
