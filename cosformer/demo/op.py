"""The op by itself: how close to its formula, how fast against softmax."""

import functools
from collections.abc import Iterator, Sequence

import torch

from cosformer.bench import (
    CANDIDATES,
    Case,
    Cell,
    Check,
    Setup,
    against_formula,
    median_times,
    stream_against_full_pass,
    threads,
)
from cosformer.records import Row, Run
from cosformer.report import LABELS, Times

LIMITS = {"chunked": None, "reference": 2048, "sdpa": None}
"""Longest sequence of each candidate: the quadratic form holds several [H, T, T] at once."""
SIZES = Cell(batch=1, heads=8, length=1024, width=64)
"""What is timed; the length changes."""
REPEATS = 3
"""Samples behind each median."""


def fastest_threads(seed: int, most: int) -> int:
    """So many threads of torch, or one less where others keep a core busy.

    Threads that wait for such a core slow many small products more than one large one.
    """
    attend = _case(seed, SIZES.length, ["chunked"]).calls("forward")["chunked"]

    def with_threads(count: int) -> None:
        with threads(count):
            attend()

    counts = {n: functools.partial(with_threads, n) for n in (most, most - 1) if n > 0}
    times = median_times(counts, repeats=REPEATS)
    return min(times, key=lambda count: times[count])


def checks(seed: int) -> list[Check]:
    """The linear form in float32, without and with decays, against the formula in float64."""
    compared = [
        check
        for name in ("chunked", "decay")
        for causal in (True, False)
        for check in against_formula(
            CANDIDATES[name], causal=causal, dtype=torch.float32, seed=seed
        )
    ]
    return [*compared, stream_against_full_pass(seed=seed)]


def race(this: Run, lengths: Sequence[int]) -> Iterator[Row]:
    """Rows of forward times; candidates take turns within one run."""
    for length in sorted(lengths):
        names = [name for name, limit in LIMITS.items() if limit is None or length <= limit]
        case = _case(this.seed or 0, length, names)
        times = median_times(case.calls("forward"), repeats=REPEATS)
        at = case.config("forward")
        for name, milliseconds in times.items():
            yield this.row("time", milliseconds, "ms", candidate=name, **at)


def _case(seed: int, length: int, names: Sequence[str]) -> Case:
    setup, cell = Setup("cpu", torch.float32, REPEATS, seed), SIZES._replace(length=length)
    return Case(setup, cell, setup.inputs(cell), names)


def text_table(found: Times) -> str:
    """Times by length and how often our time fits into that of softmax, aligned for a terminal."""
    lines = ["  tokens" + "".join(f"{LABELS[name]:>23}" for name in found) + "     softmax / ours"]
    for length, ours in found["chunked"].items():
        cells = [
            f"{found[name][length]:>23.2f}" if length in found[name] else f"{'–':>23}"
            for name in found
        ]
        ratio = found["sdpa"][length] / ours
        lines.append(f"{length:>8,}" + "".join(cells) + f"{ratio:>17.2f} ×")
    return "\n".join(lines)
