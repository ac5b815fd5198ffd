"""What is learnt in the demo: the next token of a text, and the value of nested operators."""

from collections.abc import Callable
from pathlib import Path

from cosformer.training import Budget, Optimiser, RunConfig, TaskConfig


def language(out: Path, seed: int) -> RunConfig:
    """Python's reference manual and docstrings, in pieces of words found on the spot."""
    task = {"text": "manual", "tokens": "bpe", "vocabulary": 1024, "length": 1024}
    return RunConfig(
        TaskConfig("lm", task),
        out,
        preset="tiny",
        optimiser=Optimiser(lr=6e-3),
        budget=Budget(batch=1),
        device="cpu",
        seed=seed,
    )


def listops(out: Path, seed: int) -> RunConfig:
    """Nested operators on digits, as Long-Range Arena has them, but fewer."""
    task = {"sizes": (2000, 200, 200), "workers": 2, "data": str(out / "data")}
    return RunConfig(
        TaskConfig("listops", task),
        out,
        preset="tiny",
        optimiser=Optimiser(lr=2e-3),
        budget=Budget(batch=4),
        device="cpu",
        seed=seed,
    )


JOBS: dict[str, tuple[Callable[[Path, int], RunConfig], float]] = {
    "lm": (language, 0.65),
    "listops": (listops, 0.35),
}
"""Name -> what makes the run, and its share of the time for learning."""
