"""`cosformer demo`: agreement with the formula, speed against softmax, a picture."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cosformer import __version__, records
from cosformer.bench.candidates import CANDIDATES, draw, forward
from cosformer.bench.checks import QUANTITIES, Check, against_formula, stream_against_full_pass
from cosformer.bench.timing import busy, median_times
from cosformer.report.figures import time_vs_length
from cosformer.report.selection import LABELS, Times, crossover_sentence, times
from cosformer.report.writing import write_whole

LIMITS = {"chunked": None, "reference": 2048, "sdpa": None}
"""Longest sequence of each candidate: the quadratic form holds several [H, T, T] at once."""


@dataclass(frozen=True)
class Options:
    """Check the linear form against the quadratic one, then race it against softmax attention."""

    lengths: tuple[int, ...] = tuple(2**n for n in range(8, 15))
    """Sequence lengths of the race."""
    heads: int = 8
    """Attention heads."""
    width: int = 64
    """Width of one head."""
    repeats: int = 3
    """Samples behind each median."""
    out: Path = Path("out")
    """Folder for demo.png and demo.jsonl."""
    seed: int = 0
    """Seed of the inputs."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be one or more positive numbers, got {self.lengths}")
        for name in ("heads", "width", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(options: Options) -> int:
    """Check, race, draw; 1 if a check fails."""
    import matplotlib  # noqa: F401  # missing, it should be so before the work and not after
    from tqdm import tqdm

    if warning := busy():
        # Threads that wait for a busy core slow many small products more than one large one.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        print(f"{warning}; one thread less is used", file=sys.stderr)
    count = torch.get_num_threads()
    threads = "1 thread" if count == 1 else f"{count} threads"
    print(f"cosformer {__version__}, torch {torch.__version__}, CPU, {threads}\n")
    if not show_checks(options.seed):
        print("the checks failed: nothing is timed", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)  # no race whose result could not be written
    rows: list[records.Row] = []
    # disable=None: a bar on a terminal, silence elsewhere
    with tqdm(total=len(options.lengths), desc="timing", unit="length", disable=None) as bar:
        for measured in race(options):
            rows += measured
            bar.update()
    found = times(rows, "forward")
    print(f"Milliseconds of one causal forward pass, {options.heads} heads of {options.width}:")
    print(text_table(found))
    print(f"\n{crossover_sentence(found)}.")
    records.append(options.out / "demo.jsonl", rows)
    write_whole(options.out / "demo.png", time_vs_length(rows, "png"))
    print(f"Picture: {options.out / 'demo.png'}. Rows: {options.out / 'demo.jsonl'}.")
    return 0


def show_checks(seed: int) -> bool:
    """Print the error of every check; True if all are small enough."""
    print("Error of the linear form in float32 against the quadratic formula in float64,")
    print("relative to the largest value:")
    print(f"{'':<15}" + "".join(f"{name:>10}" for name in QUANTITIES))
    attend, checks = CANDIDATES["chunked"].attend, list[Check]()
    for name, causal in (("causal", True), ("bidirectional", False)):
        found = against_formula(attend, causal=causal, dtype=torch.float32, seed=seed)
        print(f"  {name:<13}" + "".join(f"{check.error:>10.1e}" for check in found))
        checks += found
    stream = stream_against_full_pass(seed=seed)
    print(f"  one by one   {stream.error:>10.1e}   (a stream of single tokens)")
    checks.append(stream)
    for check in checks:
        if not check.passed:
            print(f"check failed: {check}", file=sys.stderr)
    if all(check.passed for check in checks):
        print(
            "All within twice the error of the quadratic form in float32, plus a few roundings.\n"
        )
        return True
    return False


def race(options: Options) -> Iterator[list[records.Row]]:
    """Rows of forward times, a list for each length; candidates take turns within one run."""
    this = records.Run.begin(seed=options.seed)
    setting = {
        "batch": 1,
        "heads": options.heads,
        "width": options.width,
        "causal": True,
        "dtype": "float32",
        "repeats": options.repeats,
        "pass": "forward",
    }
    for length in sorted(options.lengths):
        shape = (1, options.heads, length, options.width)
        inputs = draw(shape, 4, dtype=torch.float32, seed=options.seed)
        calls = {
            name: forward(CANDIDATES[name].attend, inputs, causal=True)
            for name, limit in LIMITS.items()
            if limit is None or length <= limit
        }
        yield [
            this.row("time", milliseconds, "ms", candidate=name, length=length, **setting)
            for name, milliseconds in median_times(calls, repeats=options.repeats).items()
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
