"""Tasks that ask one thing of a whole sequence, or of two."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cosformer.tasks.base import SPLITS, Batch, Facts, Place, Task
from cosformer.tasks.order import Order
from cosformer.tasks.ragged import Array, Ragged
from cosformer.tasks.resident import Resident
from cosformer.tasks.vocabulary import Vocabulary

HELD_OUT = 0.1
"""Share of the training samples that validate where a data set has no validation split."""


class Samples:
    """Labelled sequences, one `Ragged` for each tower, and the order they come in."""

    def __init__(
        self, towers: Sequence[Ragged], facts: Facts, device: torch.device, *, shuffled: bool
    ) -> None:
        self._towers = [
            Resident(tower, pad=facts.token("pad"), length=facts.length, device=device)
            for tower in towers
        ]
        lengths = np.sum([np.minimum(x.lengths, facts.length) for x in towers], axis=0)
        self._order = Order(lengths, shuffled=shuffled)

    def __len__(self) -> int:
        return len(self._order.lengths)

    def batch(self, place: Place) -> Batch:
        """Those of one step; which split it is does not matter."""
        indices = self._order.indices(place)
        found: Batch = {"labels": self._towers[0].labels_of(indices)}
        for suffix, tower in zip(("", "2"), self._towers, strict=False):
            found[f"tokens{suffix}"], found[f"mask{suffix}"] = tower.gather(indices)
        return found


class SequenceTask(Task):
    """Labelled sequences in three splits."""

    def __init__(
        self,
        splits: Mapping[str, Sequence[Ragged]],
        facts: Facts,
        device: torch.device | str = "cpu",
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.facts, self.device, self.vocabulary = facts, torch.device(device), vocabulary
        self._splits = {
            split: Samples(splits[split], facts, self.device, shuffled=split == "train")
            for split in SPLITS
        }
        self.sizes = {split: len(self._splits[split]) for split in SPLITS}

    def _batch(self, place: Place, draws: np.random.Generator) -> Batch:
        return self._splits[place.split].batch(place)


def majority(labels: Array) -> float:
    """Share of the most frequent label."""
    return float(np.bincount(labels).max() / len(labels))


def complete(splits: Mapping[str, Array], count: int) -> dict[str, Array]:
    """Numbers of the samples of all three splits, the missing ones by one rule.

    A set without a test split is judged on its validation split, as published numbers are, and
    validation is cut from training, so that no choice is made on what is judged. Without any
    split, a tenth validates and a tenth tests.
    """
    found = {split: splits[split] for split in SPLITS if len(splits.get(split, ()))}
    if not found:
        found["train"] = np.arange(count)
        found["train"], found["test"] = _cut(found["train"])
    if "train" not in found:
        # nothing to train on: an evaluation set, such as a dev split alone
        raise ValueError(f"data must have samples to train on, got {', '.join(found)} alone")
    if "test" not in found and "valid" in found:
        found["test"] = found.pop("valid")
    if "test" not in found:
        found["train"], found["test"] = _cut(found["train"])
    if "valid" not in found:
        found["train"], found["valid"] = _cut(found["train"])
    return found


def _cut(indices: Array) -> tuple[Array, Array]:
    """Most of these and a tenth, always the same."""
    if len(indices) < 2:
        raise ValueError(f"data must have 3 samples or more to be split, got {len(indices)}")
    mixed = np.random.default_rng(0).permutation(indices)
    part = max(1, round(len(indices) * HELD_OUT))
    return np.sort(mixed[part:]), np.sort(mixed[:part])
