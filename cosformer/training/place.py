"""Where a run stands."""

from dataclasses import dataclass, field
from pathlib import Path

from cosformer.config import build
from cosformer.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Place:
    """Where a run stands: what its checkpoint knows besides tensors."""

    phase: int = 0
    step: int = 0
    """Steps of the phase that are done."""
    pending: bool = False
    """Whether the model is still to be judged after the last of them."""
    lines: int = 0
    """Of the log."""
    seconds: float = 0.0
    """Spent so far."""
    metric: str | None = None
    """What the phase's task is judged by."""
    best: float | None = None
    """Its best value so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""

    def __post_init__(self) -> None:
        for name in ("phase", "step", "lines", "seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name, value in self.metrics.items():
            if not isinstance(value, float | int):
                raise ValueError(f"metrics must be numbers, got {value!r} for {name}")


def place_of(checkpoint: Checkpoint, path: Path) -> Place:
    """Where the run stood when the checkpoint was written."""
    place = checkpoint.facts.get("place")
    if not isinstance(place, dict):
        raise ValueError(f"checkpoint {path} must say where its run stood, got {place!r}")
    try:
        return build(Place, place)
    except ValueError as error:
        raise ValueError(f"checkpoint {path} must say where its run stood: {error}") from None
