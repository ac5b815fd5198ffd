"""What tables and figures ask of rows: the newest run, its times, the length of the crossover."""

import math
from collections.abc import Sequence
from itertools import pairwise

from cosformer.records import Row

LABELS = {
    "chunked": "cosFormer",
    "reference": "cosFormer, quadratic",
    "sdpa": "softmax (SDPA)",
}
"""Names of candidates for readers; one that is missing here keeps its own."""

PASSES = {"forward": "forward", "forward_backward": "forward + backward"}

Times = dict[str, dict[int, float]]
"""Candidate -> length -> milliseconds."""


def newest_run(rows: Sequence[Row]) -> list[Row]:
    """The rows of the run that began last: numbers of different runs are never compared."""
    newest = max((row.date for row in rows), default="")
    return [row for row in rows if row.date == newest]


def times(rows: Sequence[Row], pass_name: str) -> Times:
    """Times of one pass by candidate and length, in the order in which they were measured."""
    found: Times = {}
    for row in rows:
        if row.what == "time" and row.config["pass"] == pass_name:
            found.setdefault(row.config["candidate"], {})[row.config["length"]] = row.value
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
    """An interpolated length is not known better than this."""
    return int(float(f"{number:.2g}"))


def describe(rows: Sequence[Row]) -> str:
    """Hardware, setting, versions and commit of a run on one line."""
    row = rows[0]
    c, hardware = row.config, row.hardware
    where = hardware["name"]
    if "threads" in hardware:
        where += f", {hardware['threads']} threads"
    what = f"batch {c['batch']}, {c['heads']} heads of {c['width']}, {c['dtype']}"
    if "causal" in c:
        what += ", causal" if c["causal"] else ", full"
    if "repeats" in c:
        what += f"; median of {c['repeats']}"
    code = f"torch {row.versions['torch']}, commit {row.commit or 'unknown'}, {row.date[:10]}"
    return f"{where}; {what}; {code}"
