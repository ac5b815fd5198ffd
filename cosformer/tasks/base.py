"""What a training loop knows of a task: its facts, and batches as a pure function."""

import abc
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cosformer.check import check_whole
from cosformer.tasks.tables import Names
from cosformer.tasks.vocabulary import SPECIALS, Vocabulary

SPLITS = ("train", "valid", "test")
"""The parts of a data set: to learn from, to choose by, to judge by."""
IGNORED = -100
"""Label of a token that nothing is asked about; PyTorch's cross entropy leaves it out."""

Batch = dict[str, Tensor]
"""`tokens` [B, T] and `mask` [B, T] (True: a real token); `labels`: one for each
token [B, T] or one for each sequence [B]; for two towers also `tokens2` and `mask2`."""


@dataclass(frozen=True)
class Facts:
    """Shapes, losses and what a result must beat."""

    data_tokens: int
    """Tokens of the data are 0 … data_tokens - 1; the specials follow."""
    classes: int
    """Labels are 0 … classes - 1: the width of a model's output."""
    length: int
    """No sequence is longer."""
    asks: Literal["tokens", "sequence"]
    """A label for each token, or one for the sequence. The loss is the mean cross entropy."""
    metric: Literal["accuracy", "nats"]
    """What to report: share of right answers (higher is better), or the loss (lower is)."""
    floor: float
    """The metric of a simple guess, which a trained model must beat."""
    floor_is: str
    """How that guess is made."""
    asked: int | None = None
    """The most labels of a sample, so that a loss need not look at all tokens; None: any number."""
    causal: bool = False
    """A model must not look ahead: the answer may lie there."""
    towers: int = 1
    """2 if a sample is two sequences, encoded apart."""

    @property
    def vocabulary(self) -> int:
        return self.data_tokens + len(SPECIALS)

    def token(self, special: str) -> int:
        """The number of one of `SPECIALS`."""
        return special_token(special, self.data_tokens)


class Task(abc.ABC):
    """Data in three splits. `facts` and `sizes` (samples of each split) are set when built."""

    facts: Facts
    sizes: Mapping[str, int]
    device: torch.device
    vocabulary: Vocabulary | None = None
    """How tokens are written, where they are those of a text."""
    names: Names | None = None
    """What the classes of texts are called, where a table says so."""
    notes: tuple[str, ...] = ()
    """What a user should know about the data, such as how many texts are cut; a sentence each."""

    @abc.abstractmethod
    def digest(self) -> str:
        """A checksum of all data, or of the first batch where samples are drawn as asked for."""

    def batch(
        self, split: str, *, seed: int, rank: int, step: int, batch_size: int, ranks: int = 1
    ) -> Batch:
        """One batch, on the task's device; nothing but the arguments decides what is in it.

        Training has any number of steps: every epoch has its own order, and `ranks` share each
        step. Validation and test go through all samples once, in the same order for every seed;
        `batches` says in how many steps.
        """
        self._require(split, seed=seed, rank=rank, step=step, batch_size=batch_size, ranks=ranks)
        draws = np.random.default_rng([seed, SPLITS.index(split), rank, step])
        which = BatchId(split, seed, rank, step, batch_size, ranks)
        return self._batch(which, draws)

    def batches(self, split: str, batch_size: int, *, ranks: int = 1) -> int:
        """Steps in which every sample is seen once; training leaves out what fills no step."""
        self._require(split, seed=0, rank=0, step=0, batch_size=batch_size, ranks=ranks)
        whole, rest = divmod(self.sizes[split], batch_size * ranks)
        return max(1, whole) if split == "train" else whole + (rest > 0)

    def evaluation(self, split: str, batch_size: int) -> Iterator[Batch]:
        """The batches that hold every sample of a split once; what is drawn is drawn by seed 0."""
        for step in range(self.batches(split, batch_size)):
            yield self.batch(split, seed=0, rank=0, step=step, batch_size=batch_size)

    @abc.abstractmethod
    def _batch(self, which: "BatchId", draws: np.random.Generator) -> Batch:
        """The batch; `draws` is for what is random within it."""

    def _require(self, split: str, **numbers: int) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        for name, value in numbers.items():
            least = 1 if name in ("batch_size", "ranks") else 0
            check_whole(name, value, least)
        if numbers["rank"] >= numbers["ranks"]:
            raise ValueError(
                f"rank must be below ranks = {numbers['ranks']}, got {numbers['rank']}"
            )
        if self.sizes[split] == 0:
            raise ValueError(f"split must have samples, got {split!r}, which has none")


class Derived(Task):
    """A task on the samples of another."""

    def __init__(self, task: Task, facts: Facts) -> None:
        self.task, self.facts = task, facts
        self.sizes, self.device = task.sizes, task.device
        self.vocabulary, self.notes = task.vocabulary, task.notes

    def digest(self) -> str:
        return self.task.digest()


def facts_of_inputs(of: Facts, *, causal: bool) -> Facts:
    """Facts of a task that asks for the tokens of another one's inputs."""
    is_text = of.metric == "nats"  # whose frequencies make a better guess
    return replace(
        of,
        classes=of.data_tokens,
        asks="tokens",
        metric="nats",
        floor=of.floor if is_text else math.log(of.data_tokens),
        floor_is=of.floor_is if is_text else "the same chance for every token",
        asked=None,
        causal=causal,
    )


@dataclass(frozen=True)
class BatchId:
    """The arguments that decide which batch is made."""

    split: str
    seed: int
    rank: int
    step: int
    batch_size: int
    ranks: int


def special_token(special: str, data_tokens: int) -> int:
    """The number of one of `SPECIALS` above so many tokens of the data."""
    return data_tokens + SPECIALS.index(special)


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """One checksum of the shapes and bytes of tensors, in this order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.contiguous().cpu().numpy().data)
    return found.hexdigest()


def require_options(**numbers: Any) -> None:
    """An error unless all of these are whole numbers from 1 on."""
    for name, value in numbers.items():
        check_whole(name, value, 1)
