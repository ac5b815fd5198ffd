"""Which samples a batch holds: shuffled anew each epoch, those of similar length together."""

import functools

import numpy as np

from cosformer.tasks.base import BatchId
from cosformer.tasks.ragged import Array

POOL = 50
"""Batches whose samples are sorted by length together: large enough that little is padded,
small enough that what is long comes at any time of the epoch."""


JITTER = 0.1
"""Share of its length by which a sample may be misplaced in that sorting."""


class Order:
    """The order of samples with these lengths."""

    def __init__(self, lengths: Array, *, shuffled: bool) -> None:
        self.lengths, self.shuffled = lengths, shuffled
        self.is_even = len(lengths) == 0 or bool((lengths == lengths[0]).all())
        # the latest epochs are kept: drawing one anew at each step would cost more than the batch
        self._epoch = functools.lru_cache(maxsize=4)(self._draw)

    def indices(self, which: BatchId) -> Array:
        """Numbers of the samples in a batch; fewer, or none, at the end of what is not shuffled."""
        together = which.batch_size * which.ranks
        epoch, step = 0, which.step
        if self.shuffled:
            # a set smaller than one step is one step an epoch
            epoch, step = divmod(step, max(1, len(self.lengths) // together))
        order = self._epoch(which.seed if self.shuffled else 0, epoch, together)
        # neighbours have similar lengths: dealt out in turn, all ranks get the same work
        return order[step * together : (step + 1) * together][which.rank :: which.ranks]

    def _draw(self, seed: int, epoch: int, together: int) -> Array:
        count = len(self.lengths)
        if not self.shuffled:
            return np.argsort(self.lengths, kind="stable")
        rng = np.random.default_rng([seed, epoch, 0])
        if count < together:  # repeated until there are enough
            rounds = [rng.permutation(count) for _ in range(-(-together // count))]
            return np.concatenate(rounds)[:together]
        order = rng.permutation(count)[: count // together * together]
        if self.is_even:
            return order
        pools = np.array_split(order, np.arange(together * POOL, len(order), together * POOL))
        # not quite sorted: a small set would have the same batches in every epoch
        roughly = self.lengths * rng.uniform(1 - JITTER, 1 + JITTER, count)
        sorted_pools = [pool[np.argsort(roughly[pool], kind="stable")] for pool in pools]
        steps = np.concatenate(sorted_pools).reshape(-1, together)
        return rng.permutation(steps).reshape(-1)
