"""Tasks that ask one thing of a whole sequence, or of two."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cosformer.tasks.base import SPLITS, Batch, BatchId, Facts, Task, sha256_of
from cosformer.tasks.order import Order
from cosformer.tasks.ragged import Array, Ragged
from cosformer.tasks.resident import Resident
from cosformer.tasks.tables import Names
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

    def all(self) -> list[Tensor]:
        """All sequences and labels, as they are kept."""
        return [tensor for tower in self._towers for tensor in tower.all()]

    def batch(self, which: BatchId) -> Batch:
        """The samples of one step."""
        indices = self._order.indices(which)
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
        notes: Sequence[str] = (),
        names: Names | None = None,
    ) -> None:
        self.facts, self.device = facts, torch.device(device)
        self.vocabulary, self.names = vocabulary, names
        towers = [tower for split in SPLITS for tower in splits[split]]
        cut = sum(int((tower.lengths > facts.length).sum()) for tower in towers)
        self.notes = (*notes, *cut_note(cut, sum(map(len, towers)), facts.length))
        self._splits = {
            split: Samples(splits[split], facts, self.device, shuffled=split == "train")
            for split in SPLITS
        }
        self.sizes = {split: len(self._splits[split]) for split in SPLITS}

    def digest(self) -> str:
        return sha256_of(tensor for split in SPLITS for tensor in self._splits[split].all())

    def _batch(self, which: BatchId, draws: np.random.Generator) -> Batch:
        return self._splits[which.split].batch(which)


def cut_note(cut: int, count: int, length: int) -> list[str]:
    """A sentence that says how many sequences lose their end; none if none do."""
    if not cut:
        return []
    return [f"{cut:,} of {count:,} sequences are longer than length={length:,} and are cut"]


def empty_note(empty: int, count: int) -> list[str]:
    """A sentence that says how many texts have no token; none if none do."""
    if not empty:
        return []
    return [f"{empty:,} of {count:,} texts are empty and are read as one start token"]


def facts_of_classes(
    judged: Array, *, classes: int, length: int, data_tokens: int = 256, towers: int = 1
) -> Facts:
    """Facts of a task on whole sequences; `judged`: the labels of its test split."""
    return Facts(
        data_tokens=data_tokens,
        classes=classes,
        length=length,
        asks="sequence",
        metric="accuracy",
        floor=float(np.bincount(judged).max() / len(judged)),
        floor_is="the most frequent class of the test split",
        towers=towers,
    )


def complete(splits: Mapping[str, Array], count: int) -> dict[str, Array]:
    """Numbers of the samples of all three splits, the missing ones by one rule.

    A set without a test split is judged on its validation split, as published numbers are, and
    validation is cut from training, so that no choice is made on what is judged. Without any
    split, or with one to train on alone, a tenth of all validates and a tenth tests.
    """
    found = {split: splits[split] for split in SPLITS if len(splits.get(split, ()))}
    if not found:
        found["train"] = np.arange(count)
    if "train" not in found:
        # nothing to train on: an evaluation set, such as a dev split alone
        raise ValueError(f"data must have samples to train on, got {', '.join(found)} alone")
    if "test" not in found and "valid" in found:
        found["test"] = found.pop("valid")
    missing = [split for split in ("test", "valid") if split not in found]
    samples = found["train"]
    part = max(1, round(len(samples) * HELD_OUT))
    if len(samples) <= len(missing) * part:
        least = len(missing) + 1
        raise ValueError(f"data must have {least} samples or more to be split, got {len(samples)}")
    mixed = np.random.default_rng(0).permutation(samples)  # the same on every call
    for split in missing:
        found[split], mixed = np.sort(mixed[:part]), mixed[part:]
    found["train"] = np.sort(mixed)
    return found
