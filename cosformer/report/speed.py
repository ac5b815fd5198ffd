"""One table of causal attention on every machine measured: cosFormer beside softmax."""

from collections.abc import Iterator, Sequence

from cosformer.records import Row
from cosformer.report.selection import PASSES, cell, plain, rows_of, run_with
from cosformer.report.writing import markdown, milliseconds

SOFTMAX = ("sdpa", "sdpa_flash", "sdpa_cudnn")
"""Candidates that compute softmax attention; the fastest of them is shown."""

Group = list[Row]
"""Times of one cell in one run."""


def speed_table(rows: Sequence[Row]) -> str:
    """Milliseconds of cosFormer and of softmax in the same run, a line for each machine and cell.

    A cell that was measured again is shown as the newest run has it.
    """
    header = ["machine", "batch × heads × tokens × width"]
    for title in PASSES.values():
        header += [f"{title}: softmax", "cosFormer", "ratio"]
    newest = {(_machine(group[0]), cell(group[0])): group for group in _groups(rows)}
    lines = []
    for (machine, sizes), group in sorted(newest.items(), key=_by_machine_and_length):
        line = [machine, " × ".join(f"{size:,}" for size in sizes)]
        for name in PASSES:
            ours, theirs = _pair(group, name)
            line += [milliseconds(theirs), milliseconds(ours), f"{theirs / ours:.1f} ×"]
        lines.append(line)
    return f"{markdown(header, lines)}\n\n{_origin(list(newest.values()))}"


def _groups(rows: Sequence[Row]) -> Iterator[Group]:
    """Times of causal attention by run and cell, the newest last; both sides in both passes."""
    found: dict[tuple[object, ...], Group] = {}
    for row in sorted(_chosen(rows), key=lambda row: row.date):
        if row.what == "time" and row.config["causal"]:
            found.setdefault((row.date, _machine(row), cell(row)), []).append(row)
    yield from (group for group in found.values() if all(_sides(group, name) for name in PASSES))


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """The rows of one whole run on a CPU, and of all runs on a GPU, where runs differ less."""
    rows = plain(rows)
    cpu = [row for row in rows_of(rows, "time") if row.hardware["device"] == "cpu"]
    gpu = [row for row in rows if row.hardware["device"] != "cpu"]
    return (run_with(cpu, "time") if cpu else []) + gpu


def _sides(group: Group, pass_name: str) -> bool:
    names = {row.config["candidate"] for row in group if row.config["pass"] == pass_name}
    return bool(names & set(SOFTMAX)) and not names <= set(SOFTMAX)


def _pair(group: Group, pass_name: str) -> tuple[float, float]:
    """Times of one pass: ours, which is measured first, and that of the fastest softmax."""
    of_pass = [row for row in group if row.config["pass"] == pass_name]
    ours = next(row.value for row in of_pass if row.config["candidate"] not in SOFTMAX)
    return ours, min(row.value for row in of_pass if row.config["candidate"] in SOFTMAX)


def _machine(row: Row) -> str:
    if "threads" in row.hardware:
        return f"CPU, {row.hardware['threads']} threads, {row.config['dtype']}"
    return f"{row.hardware['name']}, {row.config['dtype']}"


def _by_machine_and_length(entry: tuple[tuple[str, tuple[int, ...]], Group]) -> tuple[object, ...]:
    (_, (batch, heads, length, width)), group = entry
    return group[0].hardware["device"], _machine(group[0]), width, length, batch, heads


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
