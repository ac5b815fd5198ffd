"""What is learnt in the demo: the next token of a text, in short windows, then in long ones."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cosformer.training import Budget, Evaluation, Optimiser, RunConfig, Schedule, TaskConfig

LONGEST = 8192
"""Tokens of a long window. A model of short ones must allow as many, to go on with them."""


@dataclass(frozen=True)
class Job:
    """A run that is made with either mechanism."""

    make: Callable[[Path, int], RunConfig]
    """From the demo's folder and a seed; the mechanism and the steps are set later."""
    share: float
    """Share of the time for learning."""
    judged: int
    """How often a run is judged, the last time at its end."""


def language(out: Path, seed: int, *, length: int, rate: float) -> RunConfig:
    """Python's reference manual and docstrings, in pieces of words found on the spot."""
    task = {"text": "manual", "tokens": "bpe", "vocabulary": 1024, "length": length}
    return RunConfig(
        TaskConfig("lm", task),
        out,
        preset="tiny",
        model={"tied": False, "max_length": LONGEST},
        optimiser=Optimiser(lr=rate, betas=(0.9, 0.95), clip=0.25),
        schedule=Schedule(final=0.0),
        budget=Budget(batch=1),
        evaluation=Evaluation(),
        device="cpu",
        seed=seed,
    )


JOBS = {
    "short": Job(functools.partial(language, length=1024, rate=3e-3), 0.6, 8),
    "long": Job(functools.partial(language, length=LONGEST, rate=1e-3), 0.4, 4),
}
"""Name -> what is learnt, in this order. NOTES.md says how the rates were found."""
