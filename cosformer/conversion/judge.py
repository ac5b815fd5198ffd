"""How good the embeddings of a model are: rank correlation with what people say of pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.conversion.texts import tokens_of
from cosformer.models import pool
from cosformer.tasks import tables


class Pairs(NamedTuple):
    """Pairs of sentences and how alike people find them."""

    first: list[str]
    second: list[str]
    scores: list[float]


def read_pairs(path: Path, split: str) -> Pairs:
    """The pairs of a split of a table with the columns split, score, sentence1 and sentence2."""
    if not path.is_file():
        raise ValueError(f"pairs must be a file, got {path}")
    found = tables.stream(path, ("split", "score", "sentence1", "sentence2"))
    rows = [row for row in found if row[0] == split]
    if not rows:
        raise ValueError(f"split must be one of {path}, got {split!r}")
    return Pairs(
        [row[2] for row in rows], [row[3] for row in rows], [float(row[1]) for row in rows]
    )


@torch.no_grad()
def embed(
    model: Any, tokenizer: Any, texts: Sequence[str], *, batch: int = 64, length: int = 256
) -> Tensor:
    """Embeddings `[texts, width]` of length 1: the mean of the last hidden states of a text."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))  # little padding
    found = []
    for begin in range(0, len(texts), batch):
        chosen = [texts[n] for n in order[begin : begin + batch]]
        inputs = tokens_of(chosen, tokenizer, length, model.device)
        hidden = model(**inputs).last_hidden_state
        found.append(pool(hidden, inputs["attention_mask"].bool(), "mean").float())
    places = torch.tensor(order, device=model.device).argsort()
    return torch.nn.functional.normalize(torch.cat(found)[places], dim=-1)


def spearman(model: Any, tokenizer: Any, pairs: Pairs) -> float:
    """Spearman's correlation of the cosines of embeddings with the scores of the pairs."""
    one, other = (embed(model, tokenizer, texts) for texts in (pairs.first, pairs.second))
    cosines = (one * other).sum(-1).cpu()
    both = torch.stack([ranks(cosines), ranks(torch.tensor(pairs.scores))])
    return float(torch.corrcoef(both)[0, 1])


def ranks(values: Tensor) -> Tensor:
    """The rank of each value in float64; equal values have their mean rank.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, number, count = torch.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2.0).double()[number]
