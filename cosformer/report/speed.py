"""One table of causal attention on every machine measured: cosFormer beside softmax."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cosformer.records import Row
from cosformer.report.selection import PASSES, cell, plain, rows_of, run_with
from cosformer.report.writing import markdown, milliseconds

SOFTMAX = ("sdpa", "sdpa_flash", "sdpa_cudnn")
"""Candidates that compute softmax attention; the fastest of them is shown."""

Group = list[Row]
"""Times of one pass of one cell in one run."""


class Pair(NamedTuple):
    """A time of cosFormer and one of softmax, of the same run and cell."""

    ours: Row
    theirs: Row


def fastest_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Both passes of causal attention beside the fastest softmax, the newest of every cell."""
    if not any(row.what == "time" for row in rows):
        return []
    newest: dict[tuple[str, tuple[int, ...]], Pair] = {}
    for group in _groups(rows):
        if group[0].config["pass"] == "forward_backward":
            newest[_machine(group[0]), cell(group[0])] = _pair(group)
    return list(newest.values())


def speed_table(rows: Sequence[Row]) -> str:
    """Milliseconds of cosFormer and of softmax in the same run, a line for each machine and cell.

    A pass of a cell that was measured again is shown as the newest run has it.
    """
    header = ["machine", "batch × heads × tokens × width"]
    for title in PASSES.values():
        header += [f"{title}: softmax", "cosFormer", "ratio"]
    newest: dict[tuple[str, tuple[int, ...]], dict[str, Group]] = {}
    for group in _groups(rows):
        at = newest.setdefault((_machine(group[0]), cell(group[0])), {})
        at[group[0].config["pass"]] = group
    lines, shown = [], []
    for (machine, sizes), found in sorted(newest.items(), key=_by_machine_and_length):
        if len(found) < len(PASSES):
            continue
        line = [machine, " × ".join(f"{size:,}" for size in sizes)]
        for name in PASSES:
            ours, theirs = (row.value for row in _pair(found[name]))
            line += [milliseconds(theirs), milliseconds(ours), f"{theirs / ours:.1f} ×"]
            shown.append(found[name])
        lines.append(line)
    return f"{markdown(header, lines)}\n\n{_origin(shown)}"


def _groups(rows: Sequence[Row]) -> Iterator[Group]:
    """Times of causal attention by run, cell and pass, the newest last; both sides are there."""
    found: dict[tuple[object, ...], Group] = {}
    for row in sorted(_chosen(rows), key=lambda row: row.date):
        if row.what == "time" and row.config["causal"]:
            at = (row.date, _machine(row), cell(row), row.config["pass"])
            found.setdefault(at, []).append(row)
    yield from (group for group in found.values() if _has_both_sides(group))


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """The rows of one whole run on a CPU, and of all runs on a GPU, where runs differ less."""
    rows = plain(rows)
    cpu = [row for row in rows_of(rows, "time") if row.hardware["device"] == "cpu"]
    gpu = [row for row in rows if row.hardware["device"] != "cpu"]
    return (run_with(cpu, "time") if cpu else []) + gpu


def _has_both_sides(group: Group) -> bool:
    names = {row.config["candidate"] for row in group}
    return bool(names & set(SOFTMAX)) and not names <= set(SOFTMAX)


def _pair(group: Group) -> Pair:
    """Our time, which is measured first, and that of the fastest softmax."""
    ours = next(row for row in group if row.config["candidate"] not in SOFTMAX)
    softmax = (row for row in group if row.config["candidate"] in SOFTMAX)
    return Pair(ours, min(softmax, key=lambda row: row.value))


def _machine(row: Row) -> str:
    if "threads" in row.hardware:
        return f"CPU, {row.hardware['threads']} threads, {row.config['dtype']}"
    return f"{row.hardware['name']}, {row.config['dtype']}"


def _by_machine_and_length(
    entry: tuple[tuple[str, tuple[int, ...]], dict[str, Group]],
) -> tuple[object, ...]:
    (machine, (batch, heads, length, width)), found = entry
    [row, *_] = next(iter(found.values()))
    return row.hardware["device"], machine, width, length, batch, heads


def _origin(groups: Sequence[Group]) -> str:
    """Which runs the lines are of."""
    runs = dict.fromkeys(
        f"{row.hardware['name']}, torch {row.versions['torch']}, "
        f"commit {row.commit or 'unknown'}, {row.date[:10]}"
        for group in groups
        for row in group[:1]
    )
    return (
        "Milliseconds of causal attention as the caller sees them. Softmax is the fastest one that "
        f"PyTorch has. {'; '.join(sorted(runs))}."
    )
