"""Generated probes of what linear attention finds hard; samples are drawn as they are asked for."""

import abc

import numpy as np
import torch

from cosformer.tasks.base import (
    IGNORED,
    SPLITS,
    Batch,
    BatchId,
    Facts,
    Task,
    require_options,
    sha256_of,
)
from cosformer.tasks.ragged import Array

SIZES = {"train": 100_000, "valid": 3_000, "test": 3_000}
"""Samples of a split: what counts as an epoch of training, and what is judged on."""
KEEP = 0.01
"""MQAR's exponent a: how strongly queries come soon after the pairs."""


class Probe(Task):
    """Training draws new samples at every step; validation and test have fixed ones."""

    sizes = SIZES

    def __init__(self, facts: Facts, *, device: torch.device | str) -> None:
        self.facts, self.device = facts, torch.device(device)

    def digest(self) -> str:
        batch = self.batch("train", seed=0, rank=0, step=0, batch_size=8)
        return sha256_of(batch[name] for name in sorted(batch))

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator, count: int, split: str) -> tuple[Array, Array]:
        """Tokens and labels [count, T]."""

    def _batch(self, which: BatchId, draws: np.random.Generator) -> Batch:
        if which.split == "train":
            tokens, labels = self.draw(draws, which.batch_size, "train")
        else:
            first = (which.step * which.ranks + which.rank) * which.batch_size
            last = min(first + which.batch_size, self.sizes[which.split])
            tokens, labels = self._fixed(which.split, range(first, last))
        found = {"tokens": tokens, "labels": labels, "mask": np.ones(tokens.shape, bool)}
        return {name: torch.from_numpy(array).to(self.device) for name, array in found.items()}

    def _fixed(self, split: str, numbers: range) -> tuple[Array, Array]:
        rngs = [np.random.default_rng([SPLITS.index(split), n]) for n in numbers]
        found = [self.draw(rng, 1, split) for rng in rngs]
        if not found:
            return self.draw(np.random.default_rng(0), 0, split)
        return np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found])


class Recall(Probe):
    """MQAR (Arora et al. 2024): pairs of key and value, later the keys again: which value?"""

    def __init__(
        self,
        *,
        length: int = 256,
        pairs: int = 16,
        vocabulary: int = 8192,
        device: torch.device | str = "cpu",
    ) -> None:
        require_options(length=length, pairs=pairs, vocabulary=vocabulary)
        if length % 2 or length < 4 * pairs:
            raise ValueError(
                f"length must be even and 4 · pairs = {4 * pairs} or more, got {length}"
            )
        if vocabulary < 2 * pairs + 2:
            raise ValueError(f"vocabulary must be {2 * pairs + 2} or more, got {vocabulary}")
        self.pairs, half = pairs, vocabulary // 2
        self.keys, self.values = (1, half), (half, vocabulary)
        gaps = np.arange(1, (length - 2 * pairs) // 2 + 1)
        self._chances = np.log(gaps ** (KEEP - 1.0))
        facts = _facts(length, vocabulary, pairs, 1 / pairs, "one of the values that were seen")
        super().__init__(facts, device=device)

    def draw(self, rng: np.random.Generator, count: int, split: str) -> tuple[Array, Array]:
        length, pairs = self.facts.length, self.pairs
        keys = _distinct(rng, count, pairs, *self.keys)
        values = _distinct(rng, count, pairs, *self.values)
        # without replacement, in proportion: the largest of log p plus Gumbel noise
        noise = self._chances + rng.gumbel(size=(count, len(self._chances)))
        gaps = rng.permuted(np.argsort(-noise, axis=1)[:, :pairs], axis=1)
        rows, positions = np.arange(count)[:, None], 2 * pairs + 2 * gaps
        tokens = rng.integers(0, self.facts.data_tokens, (count, length))
        labels = np.full((count, length), IGNORED)
        tokens[:, : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        tokens[rows, positions], labels[rows, positions] = keys, values
        return tokens, labels


class Copying(Probe):
    """Selective copying: tokens at random positions among blanks, to be said again at the end."""

    def __init__(
        self,
        *,
        length: int = 256,
        copied: int = 16,
        vocabulary: int = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        require_options(length=length, copied=copied, vocabulary=vocabulary)
        if length < copied:
            raise ValueError(f"length must be {copied} or more, as copied is, got {length}")
        self.copied, self.room = copied, length
        # tokens, a blank, and a sign that asks for the next one
        self.blank, self.ask = vocabulary, vocabulary + 1
        facts = _facts(length + copied, vocabulary + 2, copied, 1 / vocabulary, "any token")
        super().__init__(facts, device=device)

    def draw(self, rng: np.random.Generator, count: int, split: str) -> tuple[Array, Array]:
        wanted = rng.integers(0, self.blank, (count, self.copied))
        positions = np.sort(_distinct(rng, count, self.copied, 0, self.room), axis=1)
        tokens = np.full((count, self.room + self.copied), self.blank)
        tokens[np.arange(count)[:, None], positions] = wanted
        tokens[:, self.room :] = self.ask
        labels = np.full(tokens.shape, IGNORED)
        labels[:, self.room :] = wanted
        return tokens, labels


class Induction(Probe):
    """Induction heads: what followed the special token, when it comes again at the very end?

    Training has sequences of `length`; validation and test of `test_length`.
    """

    def __init__(
        self,
        *,
        length: int = 256,
        test_length: int | None = None,
        vocabulary: int = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        test_length = length if test_length is None else test_length
        require_options(length=length, test_length=test_length, vocabulary=vocabulary)
        for name, value in (("length", length), ("test_length", test_length)):
            if value < 3:
                raise ValueError(f"{name} must be 3 or more, got {value}")
        self.lengths = {"train": length, "valid": test_length, "test": test_length}
        self.special = vocabulary
        facts = _facts(max(length, test_length), vocabulary + 1, 1, 1 / vocabulary, "any token")
        super().__init__(facts, device=device)

    def draw(self, rng: np.random.Generator, count: int, split: str) -> tuple[Array, Array]:
        length, rows = self.lengths[split], np.arange(count)
        tokens = rng.integers(0, self.special, (count, length))
        position = rng.integers(0, length - 2, count)
        tokens[rows, position] = tokens[:, -1] = self.special
        labels = np.full(tokens.shape, IGNORED)
        labels[:, -1] = tokens[rows, position + 1]
        return tokens, labels


def _facts(length: int, vocabulary: int, asked: int, floor: float, floor_is: str) -> Facts:
    return Facts(
        data_tokens=vocabulary,
        classes=vocabulary,
        length=length,
        asks="tokens",
        metric="accuracy",
        floor=floor,
        floor_is=floor_is,
        asked=asked,
        causal=True,
    )


def _distinct(rng: np.random.Generator, count: int, number: int, low: int, high: int) -> Array:
    """[count, number] different numbers from low to high - 1 in each row."""
    if number * 4 > high - low:
        return low + np.argsort(rng.random((count, high - low)), axis=1)[:, :number]
    found = rng.integers(low, high, (count, number))
    while True:  # few meet: draw the rows in which two do anew
        ordered = np.sort(found, axis=1)
        again = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if not again.any():
            return found
        found[again] = rng.integers(low, high, (int(again.sum()), number))
