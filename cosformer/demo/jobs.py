"""What is learnt in the demo: the next token of a text, and the value of nested operators."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cosformer.training import Budget, Evaluation, Optimiser, RunConfig, Schedule, TaskConfig


@dataclass(frozen=True)
class Job:
    """A run that is made with either mechanism."""

    make: Callable[[Path, int], RunConfig]
    """From the demo's folder and a seed; the steps are planned later."""
    share: float
    """Share of the time for learning."""
    judged: int
    """How often a run is judged, the last time at its end."""


def language(out: Path, seed: int) -> RunConfig:
    """Python's reference manual and docstrings, in pieces of words found on the spot."""
    task = {"text": "manual", "tokens": "bpe", "vocabulary": 1024, "length": 1024}
    return RunConfig(
        TaskConfig("lm", task),
        out,
        preset="tiny",
        model={"tied": False, "positions": "sinusoidal"},
        optimiser=Optimiser(lr=1e-2, betas=(0.9, 0.95), clip=0.25),
        schedule=Schedule(final=0.0),
        budget=Budget(batch=1),
        evaluation=Evaluation(batches=8),
        device="cpu",
        seed=seed,
    )


def listops(out: Path, seed: int) -> RunConfig:
    """Nested operators on digits, as Long-Range Arena has them, but few; read at their root."""
    task = {"sizes": (2000, 200, 200), "workers": 2, "data": str(out / "data")}
    return RunConfig(
        TaskConfig("listops", task),
        out,
        preset="tiny",
        model={"pooling": "first"},
        optimiser=Optimiser(lr=2e-3),
        budget=Budget(batch=4),
        device="cpu",
        seed=seed,
    )


JOBS = {"lm": Job(language, 0.7, 8), "listops": Job(listops, 0.3, 2)}
"""Name of the task -> what is learnt, in this order."""
