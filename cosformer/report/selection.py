"""What tables and figures ask of rows: one run, its times, the length of the crossover."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from cosformer.records import Row

LABELS = {
    "chunked": "cosFormer",
    "reference": "cosFormer, quadratic",
    "sdpa": "softmax (SDPA)",
    "auto": "cosFormer",
    "decay": "cosFormer, a decay per head",
    "gates": "cosFormer, a decay per token",
    "sdpa_flash": "softmax (flash)",
    "sdpa_cudnn": "softmax (cuDNN)",
    "fla_cos": "cosFormer on fla",
    "fla_linear": "linear, no cosine (fla)",
    "fla_fused": "linear, fused, no cosine (fla)",
    "fla_retention": "retention (fla)",
    "fla_simple_gla": "simple GLA (fla)",
    "fla_gla": "GLA, a gate per column (fla)",
    "cosformer": "cosFormer",
    "softmax": "softmax (SDPA)",
}
"""Names of candidates for readers; one that is missing here keeps its own."""

FORMER = {"triton": "auto"}
"""Former names of candidates: rows up to 16 November 2026 say triton where `auto` is measured."""

PASSES = {"forward": "forward", "forward_backward": "forward + backward"}

WHOLE = 0.95
"""A run that has this share of the rows of the largest run counts as whole."""

Times = dict[str, dict[int, float]]
"""Candidate -> length -> milliseconds."""

Cell = tuple[int, int, int, int]
"""Batch, heads, length, width."""


def renamed(row: Row) -> Row:
    """The row with the name that its candidate has today."""
    name = row.config.get("candidate")
    return replace(row, config={**row.config, "candidate": FORMER[name]}) if name in FORMER else row


def fresh(rows: Sequence[Row]) -> list[Row]:
    """Rows of calls from Python: not those of an earlier version that replayed calls in C++."""
    return [row for row in rows if row.versions.get("host") != "C++"]


def plain(rows: Sequence[Row]) -> list[Row]:
    """Fresh rows of attention without decay, grouped heads and packed sequences, in usual types."""
    decays = {"decay", "gates", "fla_retention", "fla_simple_gla", "fla_gla"}
    return [
        row
        for row in fresh(rows)
        if row.config.get("candidate") not in decays
        and not row.config.keys() & {"key_heads", "packing"}
        and row.config.get("dtype") != "float16"
    ]


def run_with(rows: Sequence[Row], what: str) -> list[Row]:
    """The rows of the run that measured this quantity most often, the newest of several.

    Numbers of different runs are never compared. A newer run that measured only a part again does
    not replace a whole one. A run that lacks a twentieth of the largest one's rows counts as whole:
    a call that takes about as long as is allowed is measured in one run and skipped in the next.
    """
    counts = Counter(row.date for row in rows_of(rows, what))
    most = max(counts.values())
    chosen = max(date for date, count in counts.items() if count >= WHOLE * most)
    return [row for row in rows if row.date == chosen]


def rows_of(rows: Sequence[Row], what: str) -> list[Row]:
    """The rows of one quantity; an error if there are none."""
    found = [row for row in rows if row.what == what]
    if not found:
        raise ValueError(
            f"a run must have rows of {what!r}, got {sorted({row.what for row in rows})}"
        )
    return found


def candidates(rows: Sequence[Row]) -> list[str]:
    """Who was measured, in that order."""
    return list(dict.fromkeys(r.config["candidate"] for r in rows if "candidate" in r.config))


def last_of_each(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The last row of each trial, which these names in its config tell from the others.

    One that failed may have been tried again, and files of two machines may have been joined.
    """
    return list({tuple(row.config.get(name) for name in names): row for row in rows}.values())


def runs_of_each(rows: Sequence[Row], what: str) -> list[Row]:
    """For each candidate the run that measured it most often, all under one setting.

    On a GPU alone: on a CPU, what else goes on changes numbers too much to compare two runs.
    """
    run = run_with(rows, what)
    if run[0].hardware["device"] != "cuda":
        return run
    setting = _setting(rows_of(run, what)[0])
    alike = {row.date for row in rows if row.what == what and _setting(row) == setting}
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.date in alike and "candidate" in row.config:
            found.setdefault(row.config["candidate"], []).append(row)
    measured = (each for each in found.values() if any(row.what == what for row in each))
    return [row for each in measured for row in run_with(each, what)]


def _setting(row: Row) -> tuple[object, ...]:
    return tuple(row.config[name] for name in ("batch", "heads", "width", "dtype"))


def times(rows: Sequence[Row], pass_name: str, what: str = "time") -> Times:
    """Times of one pass by candidate and length, in the order in which they were measured."""
    found: Times = {}
    for row in rows:
        if row.what == what and row.config["pass"] == pass_name:
            found.setdefault(row.config["candidate"], {})[row.config["length"]] = row.value
    return found


def label(candidate: str, among: Collection[str]) -> str:
    """The name of a candidate for readers who see those of `among`."""
    if candidate == "chunked" and "auto" in among:
        return "cosFormer, no kernels"
    return LABELS.get(candidate, candidate)


def cell(row: Row) -> Cell:
    c = row.config
    return c["batch"], c["heads"], c["length"], c["width"]


def is_of_cells(rows: Sequence[Row]) -> bool:
    """Whether more than the length differs between the times of a run."""
    settings = {
        (*cell(row)[:2], cell(row)[3], row.config["causal"]) for row in rows if row.what == "time"
    }
    return len(settings) > 1


def token_times(rows: Sequence[Row], pass_name: str) -> Times:
    """Nanoseconds per token of causal attention, so that cells of any batch compare.

    Heads and width are those measured at most lengths.
    """
    rows = [row for row in rows if row.what == "time" and row.config["causal"]]
    lengths: dict[tuple[int, int], set[int]] = {}
    for _, heads, length, width in map(cell, rows):
        lengths.setdefault((heads, width), set()).add(length)
    if not lengths:
        return {}
    shown = max(lengths, key=lambda sizes: len(lengths[sizes]))
    found: Times = {}
    for row in rows:
        c = row.config
        if c["pass"] == pass_name and (c["heads"], c["width"]) == shown:
            taken = 1e6 * row.value / (c["batch"] * c["length"])
            found.setdefault(c["candidate"], {})[c["length"]] = taken
    return found


def crossover(ours: dict[int, float], theirs: dict[int, float]) -> float | None:
    """The length from which `ours` stays faster, interpolated in log-log.

    0 if it is faster at every common length, None if it is not at the longest.
    """
    lengths = sorted(ours.keys() & theirs.keys())
    lead = {length: math.log(theirs[length] / ours[length]) for length in lengths}
    if not lengths or lead[lengths[-1]] <= 0:
        return None
    for short, long in reversed(list(pairwise(lengths))):
        if lead[short] <= 0:
            part = lead[short] / (lead[short] - lead[long])
            return float(short * (long / short) ** part)
    return 0.0


def crossover_sentence(found: Times) -> str:
    """Where the first candidate overtakes softmax attention, in words."""
    ours, theirs = LABELS["chunked"], LABELS["sdpa"]
    if not {"chunked", "sdpa"} <= found.keys():
        raise ValueError(f"a crossover needs times of chunked and sdpa, got {sorted(found)}")
    common = found["chunked"].keys() & found["sdpa"].keys()
    length = crossover(found["chunked"], found["sdpa"])
    if length is None:
        return f"{ours} is not faster than {theirs} up to {max(common):,} tokens"
    if length == 0:
        return f"{ours} is faster than {theirs} at every length from {min(common):,} tokens on"
    return f"{ours} is faster than {theirs} from about {two_digits(length):,} tokens on"


def two_digits(number: float) -> int:
    """A number rounded to two digits: an interpolated length is known no better."""
    return int(float(f"{number:.2g}"))


def describe(rows: Sequence[Row]) -> str:
    """Hardware, setting, versions and commit of a run on one line."""
    row = next((row for row in rows if row.what == "time"), rows[0])
    c = row.config
    what = c["dtype"]
    if not is_of_cells(rows):
        what = f"batch {c['batch']}, {c['heads']} heads of {c['width']}, {what}"
        if "causal" in c:
            what += ", causal" if c["causal"] else ", full"
    return origin(row, what) + other_commits(row, rows)


def other_commits(row: Row, rows: Sequence[Row]) -> str:
    """Words for the commits of rows that another run than that of `row` has measured, and for
    their machines where they are others."""
    here, commits = row.hardware["name"], dict[str, dict[str, None]]()
    for each in rows:
        is_own = each.hardware["name"] == here and str(each.commit) == str(row.commit)
        if each.date != row.date and not is_own:
            commits.setdefault(each.hardware["name"], {})[str(each.commit)] = None
    others = [
        f"commit {', '.join(found)}{'' if name == here else f' on {name}'}"
        for name, found in commits.items()
    ]
    return f"; other lines: {'; '.join(others)}" if others else ""


def device_minutes(rows: Sequence[Row], seconds: str) -> str:
    """Minutes of the device that runs took, in words; runs that went on side by side share it.

    `seconds`: the name under which the configs of rows tell it; empty where none does.
    """
    told = [row.config for row in rows if seconds in row.config]
    minutes = sum(c[seconds] / c.get("jobs", 1) for c in told) / 60
    count = f"{minutes:,.0f} minutes" if minutes >= 1.5 else "about a minute or less"
    return f"{count} of the device" if told else ""


def machines(rows: Sequence[Row]) -> str:
    """Machines, versions and days of rows, for readers who do not look for the commit of each."""
    where = dict.fromkeys(f"{row.hardware['name']}, torch {row.versions['torch']}" for row in rows)
    days = sorted({row.date[:10] for row in rows})
    return f"{'; '.join(where)}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def origin(row: Row, setting: str) -> str:
    """One line: the machine of a row, its setting, and the code that measured it."""
    where = row.hardware["name"]
    if "threads" in row.hardware:
        count = row.hardware["threads"]
        where += ", 1 thread" if count == 1 else f", {count} threads"
    if row.hardware.get("keeps_freed_memory"):
        where += ", freed memory kept"
    if "repeats" in row.config:
        setting += f"; median of {row.config['repeats']}"
    code = f"torch {row.versions['torch']}, commit {row.commit or 'unknown'}, {row.date[:10]}"
    return f"{where}; {setting}; {code}"
