"""Synthesizer ("Rethinking Self-Attention in Transformer Models", Tay et al., 2020)."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosformer.check import check_whole
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.cache import HeldCache
from cosformer.mechanisms.padding import ranks
from cosformer.mechanisms.request import Request, repeat_heads, seen
from cosformer.mechanisms.sdpa import masked_softmax, sdpa_for
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.runtime import compute_dtype, long_dtype

TRAITS = Traits(
    causal="exact", cross=False, state="cache", positions="absolute", max_length=512, growth="n²"
)
Positions = slice | Tensor
"""Positions that follow each other, or `[B, n]`, some for every item."""


class Synthesizer(Mechanism):
    """Softmax over scores that no query–key product made. A subclass has `scores`.

    Positions count real tokens, so that padding does not shift them.
    """

    traits = TRAITS
    source = "Tay et al., ICML 2021"

    def scores(self, q: Tensor, i: Positions, j: Positions) -> Tensor:
        """`[B or 1, H, T, S]` of query positions i and key positions j, both of one kind."""
        raise NotImplementedError

    def making(self, length: int) -> tuple[int, int]:
        """The operations that make the scores, and the parameters that they read."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        dtype = long_dtype(q)
        weights = self._weights(q, k, request).to(dtype)
        return (weights @ repeat_heads(v, q).to(dtype)).to(q.dtype)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        return self._weights(q, k, request).expand(q.shape[0], -1, -1, -1).to(q.dtype)

    def empty_state(self, k: Tensor, v: Tensor) -> Any:
        return super().empty_state(k[..., :0], v)  # keys have no part in it

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, Any]:
        return super().advance(q, k[..., :0], v, state, request)

    def attend_held(self, q: Tensor, state: HeldCache) -> Tensor:
        dtype, here = long_dtype(q), state.position[:, None]
        keys = state.entries().expand(q.shape[0], -1)
        score = self.scores(q.to(compute_dtype(q.dtype)), here, keys)
        weights = masked_softmax(score, self.seen_held(state)[:, None, None]).to(dtype)
        return (weights @ repeat_heads(state.v, q).to(dtype)).to(q.dtype)

    def state_size(self, length: int) -> int:
        return self.key_heads * self.value_width * self.keep(length)

    def cost(self, length: int) -> Cost:
        pairs = self.heads * length**2
        made, read = self.making(length)
        return Cost(pairs * (2 * self.width + 5) + made, 4 * (self.numbers(length) + read + pairs))

    def positions(self, q: Tensor, k: Tensor, request: Request) -> tuple[Positions, Positions]:
        """The positions of queries and of keys."""
        i = slice(request.start, request.start + q.shape[2])
        if request.key_mask is None:
            return i, slice(k.shape[2])
        j = ranks(request.key_mask)
        return j[:, i], j

    def _weights(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        score = self.scores(q.to(compute_dtype(q.dtype)), *self.positions(q, k, request))
        found = seen(request, q.shape[2], k.shape[2], q.device)
        if found is None or request.key_mask is not None:
            return masked_softmax(score, found)
        return score.masked_fill(~found, -math.inf).softmax(-1)  # every query sees the first key


def _taken(x: Tensor, at: Positions, like: Tensor) -> Tensor:
    """Rows of x `[H, L, …]` at some positions, `[B or 1, H, n, …]`, in the dtype of `like`.

    Others than neighbours go by `index_select`: the gradient of an index in brackets sorts it.
    """
    if isinstance(at, slice):
        return x[:, at].to(like.dtype)[None]
    rows = x.to(like.dtype).index_select(1, at.flatten())
    return rows.unflatten(1, at.shape).movedim(0, 1)


class SynthesizerRandom(Synthesizer):
    """Learned scores for every pair of positions; q and k have no part in it."""

    formula = "out = softmax(R) V, R learned [heads, max_length, max_length]"

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, max_length: int = 512
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.set_max_length(max_length)
        self.table = nn.Parameter(torch.randn(heads, max_length, max_length))

    def scores(self, q: Tensor, i: Positions, j: Positions) -> Tensor:
        if isinstance(i, slice) or isinstance(j, slice):
            return self.table[:, i, j].to(q.dtype)[None]
        pairs = i[:, :, None] * self.table.shape[2] + j[:, None]
        return _taken(self.table.flatten(1), pairs, q)

    def making(self, length: int) -> tuple[int, int]:
        return 0, self.heads * length**2


class Factored(Synthesizer):
    """Scores that are products after all, so that PyTorch's attention need not store them."""

    traits = replace(TRAITS, second_derivative=False)

    def factors(self, q: Tensor, i: Positions, j: Positions) -> tuple[Tensor, Tensor]:
        """`[B or 1, H, T, r]` and `[B or 1, H, S, r]` whose product is the scores."""
        raise NotImplementedError

    def scores(self, q: Tensor, i: Positions, j: Positions) -> Tensor:
        rows, columns = self.factors(q, i, j)
        return rows @ columns.mT

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        dtype = long_dtype(q)
        rows, columns = self.factors(q.to(dtype), *self.positions(q, k, request))
        values = repeat_heads(v, q).to(dtype)
        return sdpa_for(rows, columns, values, request, scale=1.0).to(q.dtype)

    attend_held = Synthesizer.attend_held  # the same by `scores`


class SynthesizerFactorised(Factored):
    """`synthesizer` with scores of low rank; q and k have no part in it."""

    formula = "out = softmax(R₁ R₂ᵀ) V, R₁ and R₂ learned [heads, max_length, rank]"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        max_length: int = 512,
        rank: int = 8,
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.set_max_length(max_length)
        self.rank = check_whole("rank", rank, 1)
        size = rank**-0.25  # scores of variance 1
        self.rows = nn.Parameter(size * torch.randn(heads, max_length, rank))
        self.columns = nn.Parameter(size * torch.randn(heads, max_length, rank))

    def factors(self, q: Tensor, i: Positions, j: Positions) -> tuple[Tensor, Tensor]:
        return _taken(self.rows, i, q), _taken(self.columns, j, q)

    def making(self, length: int) -> tuple[int, int]:
        return 2 * self.heads * self.rank * length**2, 2 * self.heads * self.rank * length


class SynthesizerDense(Factored):
    """Each token makes its own row of scores from its q; k has no part in it."""

    formula = (
        "out_i = softmax(W₂ relu(W₁ q_i + b₁) + b₂) V, a score for each of max_length positions"
    )

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, max_length: int = 512
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.set_max_length(max_length)
        size = 1 / math.sqrt(width)
        self.hidden = nn.Parameter(size * torch.randn(heads, width, width))  # W₁
        self.hidden_bias = nn.Parameter(torch.zeros(heads, 1, width))
        self.output = nn.Parameter(size * torch.randn(heads, max_length, width))  # W₂
        self.output_bias = nn.Parameter(torch.zeros(heads, max_length))

    def factors(self, q: Tensor, i: Positions, j: Positions) -> tuple[Tensor, Tensor]:
        hidden = (q @ self.hidden.to(q.dtype).mT + self.hidden_bias.to(q.dtype)).relu()
        output, bias = _taken(self.output, j, q), _taken(self.output_bias, j, q)[..., None]
        return F.pad(hidden, (0, 1), value=1.0), torch.cat([output, bias], -1)

    def making(self, length: int) -> tuple[int, int]:
        size = self.heads * (self.width + length)
        return 2 * size * self.width * length, size * (self.width + 1)
