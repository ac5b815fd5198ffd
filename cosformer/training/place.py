"""How far a run has come, as its checkpoint records it."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from cosformer.config import build
from cosformer.training.checkpoints import Checkpoint
from cosformer.training.config import RunConfig
from cosformer.training.optimiser import COUNT


@dataclass(frozen=True)
class Place:
    """How far a run has come: what its checkpoint holds besides tensors."""

    phase: int = 0
    """Index of the current phase; a run with pretraining has two, others one."""
    step: int = 0
    """Number of steps of the current phase that are done."""
    pending: bool = False
    """Whether the model has yet to be evaluated after the last step that is done."""
    seconds: float = 0.0
    """Seconds that the run has taken so far."""
    metric: str | None = None
    """Name of the metric that decides which checkpoint of the phase is best."""
    best: float | None = None
    """The best value of that metric so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """All metrics of the last evaluation, by name."""

    def __post_init__(self) -> None:
        for name in ("phase", "step", "seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.best is not None and not math.isfinite(self.best):  # nothing is better than NaN
            raise ValueError(f"best must be finite, got {self.best}")
        for name, value in self.metrics.items():
            if not isinstance(value, float | int):
                raise ValueError(f"metrics must be numbers, got {value!r} for {name}")


def place_of(checkpoint: Checkpoint, path: Path, config: RunConfig) -> Place:
    """The place that a checkpoint holds; an error if a run with this config cannot be there.

    The optimiser counts its own steps, by which a wrong `step` is found.
    """
    given = checkpoint.facts.get("place")
    before = [] if config.pretraining is None else [config.pretraining.budget]
    budgets = [*before, config.budget]
    counts = checkpoint.part(f"optimiser.{COUNT}").values()
    try:
        if not isinstance(given, dict):
            raise ValueError(f"place must be an object, got {given!r}")
        place = build(Place, given)
        if place.phase >= len(budgets):
            raise ValueError(f"phase must be below their number, {len(budgets)}, got {place.phase}")
        if place.step > (steps := budgets[place.phase].steps):
            raise ValueError(f"step must be at most {steps}, got {place.step}")
        if any(count.numel() == 1 and float(count) != place.step for count in counts):
            raise ValueError(f"step must be what the optimiser has counted, got {place.step}")
    except ValueError as error:
        raise ValueError(f"checkpoint {path} must say where its run stood: {error}") from None
    return place
