"""Tables of times by cell, for runs in which more than the length differs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from cosformer.records import Row
from cosformer.report.selection import PASSES, Cell, cell, label
from cosformer.report.writing import MISSING, Spell, markdown, milliseconds

K = TypeVar("K", bound=Hashable)

EXPLANATION = (
    "Milliseconds as the caller sees them, forward / forward + backward. × floor: the time that "
    "the GPU takes for the first candidate, divided by the time that a copy of q, k, v and the "
    "output takes (forward + backward: three such copies)"
)


def cell_table(rows: Sequence[Row]) -> str:
    """Milliseconds by cell and candidate, a table for causal and one for full attention."""
    numbers = [row for row in rows if row.what in ("time", "floor_ratio")]
    shown = newest(numbers, lambda r: (_line(r), r.config["pass"], r.config["causal"]))
    parts = []
    for causal, title in ((True, "Causal"), (False, "Full")):
        lines = [row for row in shown if row.config["causal"] == causal]
        if lines:
            parts.append(f"{title} attention:\n\n{_table(lines)}")
    return "\n\n".join([*parts, f"{EXPLANATION}. {runs(shown)}."])


def newest(rows: Sequence[Row], subject: Callable[[Row], Hashable]) -> list[Row]:
    """Each number of a subject from the newest run that has it, in the order in which they came."""
    by_date = sorted(rows, key=lambda row: row.date)
    return list({(row.what, subject(row)): row for row in by_date}.values())


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
    times, ratios = by_pass(rows, "time", _line), by_pass(rows, "floor_ratio", _line)
    candidates = list(dict.fromkeys(candidate for (candidate, _), _ in times))
    cells = sorted({where for (_, where), _ in times}, key=lambda where: (where[3], where[2]))
    first, *others = candidates
    header = ["batch × heads × tokens × width", label(first, candidates), "× floor"]
    header += [label(candidate, candidates) for candidate in others]
    lines = []
    for where in cells:
        line = [" × ".join(f"{size:,}" for size in where)]
        line += [both_passes(times, (first, where), milliseconds)]
        line += [both_passes(ratios, (first, where), "{:.1f}".format)]
        line += [both_passes(times, (other, where), milliseconds) for other in others]
        lines.append(line)
    return markdown(header, lines)


def _line(row: Row) -> tuple[str, Cell]:
    return row.config["candidate"], cell(row)


def by_pass(
    rows: Sequence[Row], what: str, subject: Callable[[Row], K]
) -> dict[tuple[K, str], float]:
    """The subject of each number of a quantity, and its pass -> the number."""
    return {(subject(row), row.config["pass"]): row.value for row in rows if row.what == what}


def both_passes(numbers: Mapping[tuple[K, str], float], subject: K, spell: Spell) -> str:
    """The numbers of both passes of a subject, or one dash where there is neither."""
    found = [numbers.get((subject, pass_name)) for pass_name in PASSES]
    if not any(found):
        return MISSING
    return " / ".join(MISSING if value is None else spell(value) for value in found)
