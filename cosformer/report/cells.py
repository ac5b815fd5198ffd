"""Tables of times by cell, for runs in which more than the length differs."""

from collections.abc import Callable, Sequence
from typing import Any

from cosformer.records import Row
from cosformer.report.selection import PASSES, Cell, cell, label
from cosformer.report.writing import MISSING, markdown, milliseconds

Values = dict[tuple[str, str, Cell], float]
"""Candidate, pass, cell -> value."""

EXPLANATION = (
    "Milliseconds as the caller sees them, forward / forward + backward. × floor: the time that "
    "the GPU takes for the first candidate, divided by the time that a copy of q, k, v and the "
    "output takes (forward + backward: three such copies)"
)


def cell_table(rows: Sequence[Row]) -> str:
    """Milliseconds by cell and candidate, a table for causal and one for full attention."""
    shown, parts = _newest(rows), []
    for causal, title in ((True, "Causal"), (False, "Full")):
        lines = [row for row in shown if row.config["causal"] == causal]
        if lines:
            parts.append(f"{title} attention:\n\n{_table(lines)}")
    return "\n\n".join([*parts, f"{EXPLANATION}. {runs(shown)}."])


def _newest(rows: Sequence[Row]) -> list[Row]:
    """Each number from the newest run that has it, in the order in which candidates first came."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.date):
        if row.what in ("time", "floor_ratio"):
            c = row.config
            found[row.what, c["candidate"], c["pass"], c["causal"], cell(row)] = row
    return list(found.values())


def runs(rows: Sequence[Row]) -> str:
    """Where the rows were measured, and the commit, day and caller of each run."""
    last = max(rows, key=lambda row: row.date)
    runs = dict.fromkeys(
        f"{row.commit or 'unknown'} ({row.date[:16].replace('T', ' ')}"
        + (f", called from {row.versions['host']})" if "host" in row.versions else ")")
        for row in sorted(rows, key=lambda row: row.date, reverse=True)
    )
    repeats = sorted({row.config["repeats"] for row in rows})
    medians = " and ".join(map(str, repeats))
    about = f"{last.hardware['name']}; {last.config['dtype']}; medians of {medians}"
    return f"{about}; torch {last.versions['torch']}; commits {', '.join(runs)}"


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
