"""What is learnt in the demo: the next token of a text, in short windows, then in long ones."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cosformer.models import RECOMMENDED, recommended
from cosformer.training import Budget, Optimiser, RunConfig, Schedule, TaskConfig

LONGEST = 8192
"""Tokens of a long window. A model of short ones must allow as many, to go on with them."""


@dataclass(frozen=True)
class Job:
    """A run that is made with either mechanism."""

    make: Callable[[Path, int, str], RunConfig]
    """From the run's folder, a seed and a mechanism; the steps are planned later."""
    share: float
    """Share of the time for learning."""
    judged: int
    """How often a run is judged, the last time at its end."""


def language(
    out: Path, seed: int, mechanism: str, *, length: int, rates: Mapping[str, float]
) -> RunConfig:
    """Python's reference manual and docstrings, in pieces of words found on the spot."""
    task = {"text": "manual", "tokens": "bpe", "vocabulary": 1024, "length": length}
    return RunConfig(
        TaskConfig("lm", task),
        out,
        preset="tiny",
        model={**recommended("lm", mechanism), "tied": False, "max_length": LONGEST},
        optimiser=Optimiser(lr=rates[mechanism], betas=(0.9, 0.95), clip=0.25),
        schedule=Schedule(final=0.0),
        budget=Budget(batch=1),
        device="cpu",
        seed=seed,
    )


JOBS = {
    "short": Job(
        functools.partial(language, length=1024, rates={RECOMMENDED: 5e-3, "softmax": 3e-3}), 0.6, 8
    ),
    "long": Job(
        functools.partial(language, length=LONGEST, rates={RECOMMENDED: 3e-3, "softmax": 3e-3}),
        0.4,
        8,
    ),
}
"""Name -> what is learnt, in this order. Rates of short windows are the best of a search for each
mechanism; long windows have one rate for both (NOTES.md)."""
