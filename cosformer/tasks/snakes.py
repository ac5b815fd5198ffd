"""Pathfinder with shorter snakes: what a model can learn before it."""

from dataclasses import replace

import numpy as np

from cosformer.tasks.pathfinder import AT_ONCE, PathfinderRule, draw
from cosformer.tasks.ragged import Array, Ragged

LENGTHS = PathfinderRule.dashes - 1
"""Of paths that are shorter than Pathfinder's."""


def draw_snakes(
    rng: np.random.Generator, count: int, rule: PathfinderRule | None = None
) -> tuple[Array, Array]:
    """Pictures as `pathfinder.draw` makes them, equally many of each length below the rule's own.

    A label tells the length as well: 2·(dashes − 1), and 1 more if the ends belong.
    """
    rule = rule or PathfinderRule()
    lengths = range(1, rule.dashes)
    pictures, labels = [], []
    for n, dashes in enumerate(lengths[:count]):
        share = len(range(n, count, len(lengths)))
        at_once = AT_ONCE * dashes // rule.dashes
        drawn, belong = draw(rng, share, replace(rule, dashes=dashes), at_once)
        pictures.append(drawn)
        labels.append(2 * (dashes - 1) + belong)
    order = rng.permutation(count)
    return np.concatenate(pictures)[order], np.concatenate(labels)[order]


def by_length(drawn: Ragged) -> list[Ragged]:
    """The pictures of each length, the shortest first, with Pathfinder's labels."""
    lengths, belong = np.divmod(drawn.labels, 2)
    whole = Ragged(drawn.flat, drawn.starts, belong)
    return [whole.take(np.flatnonzero(lengths == n)) for n in range(LENGTHS)]
