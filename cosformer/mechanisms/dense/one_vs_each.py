"""One-vs-each ("One-vs-Each Approximation to Softmax", Titsias, 2016) as attention."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.check import check_bool
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.request import Request, repeat_heads, seen
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.runtime import compute_dtype, recomputed

SLICE = 2**22  # comparisons held at once: 16 MB in float32


class OneVsEach(Mechanism):
    """A product of pairwise contests: softmax's lower bound, and softmax itself for two keys."""

    traits = Traits(causal="exact", state="cache", normalised=False, growth="n³")
    source = "Titsias, NeurIPS 2016"
    formula = (
        "A_ij = Π_{m≠j} σ(s_ij − s_im), s_ij = q_i·k_j / √d; out = A v (renormalised: rows / Σ)"
    )

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, renormalise: bool = False
    ) -> None:
        """Rows of A sum to at most 1; `renormalise` divides them by their sums."""
        super().__init__(heads, width, key_heads=key_heads)
        check_bool("renormalise", renormalise)
        self.renormalise = renormalise
        if renormalise:
            self.traits = replace(self.traits, normalised=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        dtype = compute_dtype(q.dtype)
        return (self._weights(q, k, request) @ repeat_heads(v, q).to(dtype)).to(q.dtype)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        return self._weights(q, k, request).to(q.dtype)

    def cost(self, length: int) -> Cost:
        pairs = self.heads * length**2
        return Cost(pairs * (4 * self.width + 6 * length), 4 * (self.numbers(length) + 2 * pairs))

    def _weights(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        dtype = compute_dtype(q.dtype)
        score = q.to(dtype) @ repeat_heads(k, q).to(dtype).mT / math.sqrt(self.width)
        mask = seen(request, q.shape[2], k.shape[2], q.device)
        mask = score.new_ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
        mask = mask.expand_as(score)
        log = log_one_vs_each(score, mask).masked_fill(~mask, -math.inf)
        if not self.renormalise:
            return log.exp()
        return log.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)


def log_one_vs_each(score: Tensor, mask: Tensor) -> Tensor:
    """−Σ_{m≠j, seen} softplus(s_im − s_ij) for every j; n² memory, also for the gradient."""
    batch, heads, queries, keys = score.shape
    if not queries or not keys:
        return score
    rows = max(1, SLICE // max(1, batch * heads * keys**2))
    columns = max(1, SLICE // max(1, batch * heads * rows * keys))
    blocks = []
    for first in range(0, queries, rows):
        some, real = score[:, :, first : first + rows], mask[:, :, first : first + rows]
        row = [recomputed(_contests, some, real, low, columns) for low in range(0, keys, columns)]
        blocks.append(torch.cat(row, -1))
    return torch.cat(blocks, 2)


def _contests(score: Tensor, mask: Tensor, low: int, count: int) -> Tensor:
    mine = score[..., low : low + count, None]  # [B H t c 1]
    lost = F.softplus(score[..., None, :] - mine).masked_fill(~mask[..., None, :], 0)
    itself = math.log(2) * mask[..., low : low + count].to(score.dtype)  # the term m = j
    return itself - lost.sum(-1)
