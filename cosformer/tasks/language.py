"""Language modelling on text: the next token, or tokens that were masked."""

import copy
import dataclasses
from pathlib import Path

import numpy as np
import torch

from cosformer.tasks import text as texts
from cosformer.tasks import vocabulary as vocabularies
from cosformer.tasks.base import (
    IGNORED,
    SPLITS,
    Batch,
    BatchId,
    Derived,
    Facts,
    Task,
    facts_of_inputs,
    require_options,
    sha256_of,
)
from cosformer.tasks.order import Order
from cosformer.tasks.ragged import Array
from cosformer.tasks.resident import to_device


class LanguageTask(Task):
    """Windows of a text; every label is the token that follows.

    Each epoch of training begins its windows at another token. Validation and test ask for every
    token of the text but the first, once.
    """

    def __init__(
        self,
        tokens: dict[str, Array],
        vocabulary: vocabularies.Vocabulary,
        *,
        length: int,
        device: torch.device | str = "cpu",
    ) -> None:
        _require_length(length, len(tokens["train"]))
        for split, found in tokens.items():
            if len(found) < 2:
                raise ValueError(
                    f"the {split} part of the text must have 2 tokens or more, got {len(found)}"
                )
        self.vocabulary, self.device = vocabulary, torch.device(device)
        self._tokens = {split: to_device(_signed(tokens[split]), self.device) for split in SPLITS}
        self.bytes_per_token = {split: _mean_width(tokens[split], vocabulary) for split in SPLITS}
        self.facts = Facts(
            data_tokens=vocabulary.size,
            classes=vocabulary.size,
            length=length,
            asks="tokens",
            metric="nats",
            floor=unigram(tokens["train"], tokens["test"], vocabulary.size),
            floor_is="frequencies of single tokens in the training text",
            causal=True,
        )
        self._cut()

    def with_length(self, length: int) -> "LanguageTask":
        """The same text in windows of another length."""
        _require_length(length, len(self._tokens["train"]))
        other = copy.copy(self)
        other.facts = dataclasses.replace(self.facts, length=length)
        other._cut()
        return other

    def digest(self) -> str:
        return sha256_of(self._tokens.values())

    def _cut(self) -> None:
        """Cut every split into windows of the length."""
        length, room = self.facts.length, {s: len(self._tokens[s]) - 1 for s in SPLITS}
        self.sizes = {
            s: (room[s] // length if s == "train" else -(-room[s] // length)) for s in SPLITS
        }
        # windows of training leave a window's room, so that they can begin anywhere in it
        self.sizes["train"] = max(1, self.sizes["train"] - 1)
        self._orders = {
            split: Order(np.full(size, length), shuffled=split == "train")
            for split, size in self.sizes.items()
        }

    def _batch(self, which: BatchId, draws: np.random.Generator) -> Batch:
        flat, length = self._tokens[which.split], self.facts.length
        indices = self._orders[which.split].indices(which)
        begin = 0
        if which.split == "train":
            epoch = which.step // self.batches("train", which.batch_size, ranks=which.ranks)
            spare = len(flat) - 1 - self.sizes["train"] * length
            begin = int(np.random.default_rng([which.seed, epoch, 1]).integers(0, spare + 1))
        starts = torch.from_numpy(begin + indices * length).to(flat.device)
        positions = starts[:, None] + torch.arange(length + 1, device=flat.device)
        inside = positions < len(flat)
        found = flat[positions.clamp(max=len(flat) - 1)].long()
        tokens = torch.where(inside, found, self.facts.token("pad"))
        labels = torch.where(inside, found, IGNORED)
        mask = inside[:, 1:]  # a last token that nothing follows is no input
        batch = {
            "tokens": torch.where(mask, tokens[:, :-1], self.facts.token("pad")),
            "mask": mask,
            "labels": labels[:, 1:],
        }
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


class MaskedTask(Derived):
    """Masked prediction on the inputs of any task: BERT's (80 % masked, 10 % random, 10 % left).

    This is also how a model pre-trains on the inputs of the task that it will be judged on.
    """

    def __init__(self, task: Task, *, rate: float = 0.15) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate must lie above 0 and up to 1, got {rate}")
        if task.facts.towers != 1:
            raise ValueError(f"task must have one tower to be masked, got {task.facts.towers}")
        self.rate = rate
        super().__init__(task, facts_of_inputs(task.facts, causal=False))

    def _batch(self, which: BatchId, draws: np.random.Generator) -> Batch:
        batch = self.task._batch(which, draws)
        tokens, mask = batch["tokens"], batch["mask"]
        chance = torch.from_numpy(draws.random(tuple(tokens.shape), np.float32)).to(self.device)
        other = draws.integers(0, self.facts.data_tokens, tuple(tokens.shape))
        # separators and the like are not asked for
        chosen = mask & (tokens < self.facts.data_tokens) & (chance < self.rate)
        given = torch.where(chance < 0.8 * self.rate, self.facts.token("mask"), tokens)
        is_random = (chance >= 0.8 * self.rate) & (chance < 0.9 * self.rate)
        given = torch.where(is_random, torch.from_numpy(other).to(self.device), given)
        return {
            "tokens": torch.where(chosen, given, tokens),
            "mask": mask,
            "labels": torch.where(chosen, tokens, IGNORED),
        }


def language(
    *,
    text: str = "python",
    data: Path | str | None = None,
    held_out: int | None = None,
    tokens: vocabularies.Kind = "bytes",
    vocabulary: int | None = None,
    length: int = 512,
    learnt: vocabularies.Vocabulary | None = None,
    device: torch.device | str = "cpu",
) -> LanguageTask:
    """The next token of a text: a known one, or a file or folder of the user's.

    `held_out`: the last so many bytes are validation and test; None: the text's own split.
    """
    found = texts.load(text, data, held_out)
    kind = vocabularies.create(tokens, found["train"], vocabulary, learnt)
    encoded = {split: kind.encode(found[split]) for split in SPLITS}
    return LanguageTask(encoded, kind, length=length, device=device)


def masked(
    *,
    text: str = "python",
    data: Path | str | None = None,
    held_out: int | None = None,
    tokens: vocabularies.Kind = "bytes",
    vocabulary: int | None = None,
    length: int = 512,
    rate: float = 0.15,
    learnt: vocabularies.Vocabulary | None = None,
    device: torch.device | str = "cpu",
) -> MaskedTask:
    """Masked tokens of a text's windows, as `language` makes them."""
    windows = language(
        text=text,
        data=data,
        held_out=held_out,
        tokens=tokens,
        vocabulary=vocabulary,
        length=length,
        learnt=learnt,
        device=device,
    )
    return MaskedTask(windows, rate=rate)


def _require_length(length: int, tokens: int) -> None:
    """An error unless windows of the length can begin at two tokens or more of a training text."""
    require_options(length=length)
    if tokens < length + 2:
        raise ValueError(f"length must be below the text's {tokens - 1}, got {length}")


def unigram(train: Array, test: Array, size: int) -> float:
    """Nats a token of `test`, each token as likely as it is in `train` (one more time)."""
    counts, asked = _counts(train, size) + 1.0, _counts(test, size)
    return float(-(asked * np.log(counts / counts.sum())).sum() / asked.sum())


def _mean_width(tokens: Array, vocabulary: vocabularies.Vocabulary) -> float | None:
    """Bytes that a token of a text stands for; None where that is not known."""
    if vocabulary.widths is None:
        return None
    return float(_counts(tokens, vocabulary.size) @ vocabulary.widths / len(tokens))


def _counts(tokens: Array, size: int) -> Array:
    """In pieces: numpy counts in a copy that is eight times as large as bytes are."""
    pieces = np.array_split(tokens, len(tokens) // 2**22 + 1)
    return np.sum([np.bincount(piece, minlength=size) for piece in pieces], axis=0)


def _signed(tokens: Array) -> Array:
    """Types that every operation of torch takes; bytes stay bytes."""
    return tokens.astype(np.int32) if tokens.dtype == np.uint16 else tokens.copy()
