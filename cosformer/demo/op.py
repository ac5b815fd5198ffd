"""The op by itself: how close to its formula, how fast against softmax."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cosformer.bench import (
    CANDIDATES,
    Check,
    against_formula,
    draw_inputs,
    forward,
    median_times,
    stream_against_full_pass,
    threads,
)
from cosformer.records import Row, Run
from cosformer.report import LABELS, Times

LIMITS = {"chunked": None, "reference": 2048, "sdpa": None}
"""Longest sequence of each candidate: the quadratic form holds several [H, T, T] at once."""
SETTING: dict[str, Any] = {
    "batch": 1,
    "heads": 8,
    "width": 64,
    "causal": True,
    "dtype": "float32",
    "repeats": 3,
    "pass": "forward",
}


def fastest_threads(seed: int, most: int) -> int:
    """So many threads of torch, or one less where others keep a core busy.

    Threads that wait for such a core slow many small products more than one large one.
    """
    shape = (SETTING["batch"], SETTING["heads"], 1024, SETTING["width"])
    inputs = draw_inputs(shape, causal=True, dtype=torch.float32, seed=seed)
    attend = forward(CANDIDATES["chunked"], inputs)

    def with_threads(count: int) -> None:
        with threads(count):
            attend()

    counts = {n: functools.partial(with_threads, n) for n in (most, most - 1) if n > 0}
    times = median_times(counts, repeats=SETTING["repeats"])
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


def race(this: Run, lengths: Sequence[int]) -> Iterator[list[Row]]:
    """Rows of forward times, a list for each length; candidates take turns within one run."""
    for length in sorted(lengths):
        shape = (SETTING["batch"], SETTING["heads"], length, SETTING["width"])
        inputs = draw_inputs(shape, causal=True, dtype=torch.float32, seed=this.seed or 0)
        calls = {
            name: forward(CANDIDATES[name], inputs)
            for name, limit in LIMITS.items()
            if limit is None or length <= limit
        }
        yield [
            this.row("time", milliseconds, "ms", candidate=name, length=length, **SETTING)
            for name, milliseconds in median_times(calls, repeats=SETTING["repeats"]).items()
        ]


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
