"""Softmax over a fixed pattern of pairs: one class, given a mask function and where it looks."""

import math
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from cosformer.check import check_choice
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.cache import HeldCache
from cosformer.mechanisms.padding import ranks, with_real_first
from cosformer.mechanisms.patterns.blocked import blocked_attention
from cosformer.mechanisms.patterns.flex import flex_pattern, flex_serves
from cosformer.mechanisms.patterns.parts import Kept, Part, Sizes, neighbours
from cosformer.mechanisms.request import Request, hide, repeat_heads
from cosformer.mechanisms.sdpa import masked_softmax, sdpa_for
from cosformer.mechanisms.traits import Cost
from cosformer.runtime import compute_dtype, transformed

IMPLEMENTATIONS = ("auto", "reference", "blocked", "flex")
FURTHEST = 2**31  # distance of two positions: they are compared in 32 bits
FEW = 16  # queries for which a row of scores each is cheaper than blocks


class Masked(Mechanism):
    """Softmax over the pairs of a pattern. A subclass has `pattern` and `ranges`.

    `pattern(keys)` is the mask function of positions (i, j); `ranges(first, last, keys)` says
    where the keys of queries first … last − 1 lie, and nothing outside is looked at. One whose
    blocks are not neighbours has `parts` instead of `ranges`.

    Patterns by absolute positions count real tokens: one behind `key_mask` is absent, as a key
    and as a query (its output is 0), so that padding does not shift them.
    """

    block = 64
    """How many tokens are in a block of the blocked implementation."""

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, impl: str = "auto"
    ) -> None:
        """`impl`: reference (quadratic), blocked, flex (fast on CUDA only), or auto."""
        super().__init__(heads, width, key_heads=key_heads)
        self.impl = check_choice("impl", impl, IMPLEMENTATIONS)

    def pattern(self, keys: int, device: torch.device) -> Kept:
        """Whether query position i sees key position j, before causality and padding."""
        raise NotImplementedError

    def ranges(self, first: int, last: int, keys: int) -> Iterable[tuple[int, int]]:
        """[low, high) of keys that hold all that queries first … last − 1 see."""
        raise NotImplementedError

    def parts(self, sizes: Sizes, device: torch.device) -> tuple[Part, ...]:
        """The pairs, laid out in blocks."""
        return (self.part(sizes, self.pattern(sizes.keys, device)),)

    def part(self, sizes: Sizes, kept: Kept) -> Part:
        """The pairs within `ranges` that are kept."""
        return neighbours(
            lambda first, last: self.ranges(first, last, sizes.keys), sizes, self.block, kept
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        mask = request.key_mask
        if not (q.numel() and k.numel()):
            return q @ repeat_heads(k, q).mT @ repeat_heads(v, q)  # zeros with a gradient
        queries, keys = q.shape[2], k.shape[2]
        if not keys - FURTHEST <= request.start <= FURTHEST - queries:
            raise ValueError(
                f"start must lie in {keys} - 2³¹ ... 2³¹ - {queries}, got {request.start}"
            )
        impl = self.choose(q, v)
        if impl == "reference":
            dtype = compute_dtype(q.dtype)
            weights = self.dense(q.to(dtype), k.to(dtype), request)
            return (weights @ repeat_heads(v, q).to(dtype)).to(q.dtype)
        if mask is None or self.traits.positions != "absolute":
            return self._sparse(q, k, v, request, impl)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return self._sparse(q, k, v, request._replace(key_mask=mask, start=0), impl)

        return with_real_first(attend, mask, q, k, v, request.start)

    def choose(self, q: Tensor, v: Tensor) -> str:
        """The implementation that computes these; it is decided here if `impl` is auto."""
        if self.impl != "auto":
            return self.impl
        if q.shape[2] <= FEW:
            return "reference"
        return "flex" if flex_serves(q, v) and not transformed() else "blocked"

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        mask, start, keys = request.key_mask, request.start, k.shape[2]
        i = torch.arange(start, start + q.shape[2], device=q.device)[None]
        j = torch.arange(keys, device=q.device)[None]
        found = j[:, None] <= i[..., None] if request.causal else torch.ones_like(j[:, None] > 0)
        if mask is not None:
            found = found & mask[:, None]
            if self.traits.positions == "absolute":
                real = mask[:, start : start + q.shape[2]]
                found, q = found & real[..., None], hide(q, real)
                j = ranks(mask)
                i = j[:, start : start + q.shape[2]]
        kept = self.pattern(keys, q.device)
        found = (found & kept(i[..., None], j[:, None]))[:, None]  # [B 1 T S]
        score = q @ repeat_heads(k, q).mT / math.sqrt(self.width)
        return masked_softmax(score, found)

    def attend_held(self, q: Tensor, state: HeldCache) -> Tensor:
        return sdpa_for(q, state.k, state.v, Request(False, self.seen_held(state), 0, {}))

    def seen_held(self, state: HeldCache) -> Tensor:
        i, j = state.position[:, None], state.entries()
        return (j <= i) & self.pattern(j.shape[1], j.device)(i, j)

    def pairs(self, length: int) -> int:
        """How many pairs of a query and a key there are in a sequence."""
        raise NotImplementedError

    def cost(self, length: int) -> Cost:
        return self.cost_of_pairs(length, self.pairs(length))

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        mask, sizes = request.key_mask, Sizes(q.shape[2], k.shape[2], request.causal, request.start)
        if impl == "flex":
            return flex_pattern(q, k, v, mask, sizes, self.parts, self._settings)
        k, v = repeat_heads(k, q), repeat_heads(v, q)
        return blocked_attention(q, k, v, mask, sizes, self.parts(sizes, q.device))

    def _settings(self) -> Hashable:
        """What tells the pattern of one instance from that of another: its numbers and names."""
        plain = (item for item in vars(self).items() if isinstance(item[1], float | int | str))
        return type(self), *plain
