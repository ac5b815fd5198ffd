"""Pathfinder from its easiest form on: what a model can learn before it."""

from dataclasses import dataclass, field, replace

import numpy as np

from cosformer.tasks.pathfinder import AT_ONCE, PathfinderRule, draw
from cosformer.tasks.ragged import Array


@dataclass(frozen=True)
class SnakesRule:
    """Snakes of any length up to Pathfinder's own."""

    fewest: int = 1
    """Dashes of the shortest snakes: the ends of a single dash touch."""
    hardest: PathfinderRule = field(default_factory=PathfinderRule)

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.hardest.dashes:
            raise ValueError(
                f"fewest must lie between 1 and {self.hardest.dashes}, got {self.fewest}"
            )


def draw_snakes(
    rng: np.random.Generator, count: int, rule: SnakesRule | None = None
) -> tuple[Array, Array]:
    """As `draw`: as many pictures of each length of snakes, with up to all distractors."""
    rule = rule or SnakesRule()
    lengths = range(rule.fewest, rule.hardest.dashes + 1)
    parts = []
    for n, dashes in enumerate(lengths[:count]):
        distractors = int(rng.integers(0, rule.hardest.distractors + 1))
        like = replace(rule.hardest, dashes=dashes, distractors=distractors)
        share = len(range(n, count, len(lengths)))
        parts.append(draw(rng, share, like, AT_ONCE * dashes // rule.hardest.dashes))
    order = rng.permutation(count)
    pictures, labels = (np.concatenate(each)[order] for each in zip(*parts, strict=True))
    return pictures, labels
