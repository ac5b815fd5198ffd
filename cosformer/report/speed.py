"""One table of causal attention on every machine measured: cosFormer beside softmax."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cosformer.records import Row
from cosformer.report.selection import PASSES, cell, machines, plain, rows_of, run_with
from cosformer.report.writing import markdown, milliseconds

SOFTMAX = ("sdpa", "sdpa_flash", "sdpa_cudnn")
"""Candidates that compute softmax attention; the fastest of them is shown."""


class Pair(NamedTuple):
    """A time of cosFormer and that of the fastest softmax, of the same pass, run and cell."""

    ours: Row
    theirs: Row


def fastest_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Both passes of causal attention beside the fastest softmax, the newest of every cell."""
    if not any(row.what == "time" for row in rows):
        return []
    found = (pairs.get("forward_backward") for pairs in _newest(rows))
    return [pair for pair in found if pair is not None]


def speed_table(rows: Sequence[Row]) -> str:
    """Milliseconds of cosFormer and of softmax in the same run, a line for each machine and cell.

    A pass of a cell that was measured again is shown as the newest run has it.
    """
    header = ["machine", "batch × heads × tokens × width"]
    for title in PASSES.values():
        header += [f"{title}: softmax", "cosFormer", "ratio"]
    whole = [found for found in _newest(rows) if len(found) == len(PASSES)]
    lines, shown = [], list[Row]()
    for found in sorted(whole, key=lambda found: _place(found["forward"].ours)):
        row = found["forward"].ours
        line = [_machine(row), " × ".join(f"{size:,}" for size in cell(row))]
        for name in PASSES:
            ours, theirs = (row.value for row in found[name])
            line += [milliseconds(theirs), milliseconds(ours), f"{theirs / ours:.1f} ×"]
            shown.append(found[name].ours)
        lines.append(line)
    rule = "Milliseconds of a call of causal attention, as the caller sees them. Softmax is the "
    rule += "fastest one that PyTorch has. Ratio: its time divided by that of cosFormer"
    return f"{markdown(header, lines)}\n\n{rule}. {machines(shown)}."


def _newest(rows: Sequence[Row]) -> list[dict[str, Pair]]:
    """For each machine and cell its passes, as the newest run has them."""
    newest: dict[tuple[str, tuple[int, ...]], dict[str, Pair]] = {}
    for pair in _pairs(rows):
        at = newest.setdefault((_machine(pair.ours), cell(pair.ours)), {})
        at[pair.ours.config["pass"]] = pair
    return list(newest.values())


def _pairs(rows: Sequence[Row]) -> Iterator[Pair]:
    """Times of causal attention by run, cell and pass, the newest last."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(_chosen(rows), key=lambda row: row.date):
        if row.what == "time" and row.config["causal"]:
            at = (row.date, _machine(row), cell(row), row.config["pass"])
            found.setdefault(at, []).append(row)
    for group in found.values():
        ours = [row for row in group if row.config["candidate"] not in SOFTMAX]
        softmax = [row for row in group if row.config["candidate"] in SOFTMAX]
        if ours and softmax:
            yield Pair(ours[0], min(softmax, key=lambda row: row.value))  # ours is measured first


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """The rows of one whole run on a CPU, and of all runs on a GPU, where runs differ less."""
    rows = plain(rows)
    cpu = [row for row in rows_of(rows, "time") if row.hardware["device"] == "cpu"]
    gpu = [row for row in rows if row.hardware["device"] != "cpu"]
    return (run_with(cpu, "time") if cpu else []) + gpu


def _machine(row: Row) -> str:
    if "threads" in row.hardware:
        return f"CPU, {row.hardware['threads']} threads, {row.config['dtype']}"
    return f"{row.hardware['name']}, {row.config['dtype']}"


def _place(row: Row) -> tuple[object, ...]:
    """Where a line stands: by machine and length."""
    batch, heads, length, width = cell(row)
    return row.hardware["device"], _machine(row), width, length, batch, heads
