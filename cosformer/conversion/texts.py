"""Texts to learn from, and batches of them as a pure function of the seed and the step."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosformer.tasks import files, tables

TABLES = (".tsv", ".csv", ".jsonl")


def read_texts(paths: Iterable[Path]) -> list[str]:
    """Texts of files, each once and in their order: lines, or the cells of tables with a header.

    Files may be packed (.xz, .gz, .bz2). Blank lines are left out.
    """
    found: dict[str, None] = {}
    for path in paths:
        if not path.is_file():
            raise ValueError(f"data must be files, got {path}")
        if files.plain_suffix(path) in TABLES:
            texts: Iterable[str] = (cell for row in tables.stream(path) for cell in row)
        else:
            texts = files.read_text(path).splitlines()
        found |= dict.fromkeys(text for each in texts if (text := each.strip()))
    if not found:
        raise ValueError("data must have one or more texts, got none")
    return list(found)


class Batches:
    """Batches of tokens: every text once, in an order drawn by the seed, then all in another."""

    def __init__(
        self, texts: Sequence[str], tokenizer: Any, *, batch: int, length: int, seed: int
    ) -> None:
        self.texts, self.tokenizer = texts, tokenizer
        self.batch, self.length, self.seed = batch, length, seed
        self._orders: dict[int, list[int]] = {}

    def __call__(self, step: int, device: torch.device | str) -> Mapping[str, Tensor]:
        """The inputs of the model at a step: `input_ids` and `attention_mask`, `[B, T]`."""
        numbers = range(step * self.batch, (step + 1) * self.batch)
        chosen = [
            self.texts[self._order(n // len(self.texts))[n % len(self.texts)]] for n in numbers
        ]
        return tokens_of(chosen, self.tokenizer, self.length, device)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed + epoch * 2**20)
            order = torch.randperm(len(self.texts), generator=generator)
            # a batch may need two epochs: the one before is kept, where it was met
            kept = {n: each for n, each in self._orders.items() if n == epoch - 1}
            self._orders = kept | {epoch: order.tolist()}
        return self._orders[epoch]


def tokens_of(
    texts: Sequence[str], tokenizer: Any, length: int, device: torch.device | str
) -> dict[str, Tensor]:
    """Tokens of texts, cut at a length and padded to the longest."""
    found = tokenizer(
        list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    return {name: found[name].to(device) for name in ("input_ids", "attention_mask")}
