"""Sliding windows: local attention and Longformer (Beltagy et al., 2020)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.cache import HeldCache
from cosformer.mechanisms.padding import ranks
from cosformer.mechanisms.patterns.masked import Masked
from cosformer.mechanisms.patterns.parts import Kept, Part, Sizes, columns
from cosformer.mechanisms.request import Request, hide, repeat_heads
from cosformer.mechanisms.sdpa import masked_softmax
from cosformer.mechanisms.traits import Traits
from cosformer.runtime import compute_dtype


class Local(Masked):
    """Softmax over a window w: the query's own key and w/2 keys on either side (causal: before)."""

    traits = Traits(causal="exact", state="window", positions="relative")
    source = "Beltagy et al., 2020 (the sliding window alone)"
    formula = "out_i = Σ_j softmax_j(q_i·k_j / √d) v_j over |i − j| ≤ window/2"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        window: int = 512,
        impl: str = "auto",
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads, impl=impl)
        self.reach = half(window)
        self.block = block_for(self.reach)

    def pattern(self, keys: int, device: torch.device) -> Kept:
        reach = self.reach
        return lambda i, j: (i - j <= reach) & (j - i <= reach)

    def ranges(self, first: int, last: int, keys: int) -> Iterator[tuple[int, int]]:
        yield first - self.reach, last + self.reach

    def keep(self, position: int) -> int:
        return min(position, self.reach)

    def held_length(self, length: int) -> int:
        return self.reach + 1

    def seen_held(self, state: HeldCache) -> Tensor:
        return Mechanism.seen_held(self, state)  # older tokens have been written over

    def pairs(self, length: int) -> int:
        return length * min(2 * self.reach + 1, length)


class Longformer(Local):
    """A sliding window; the first tokens are global: they see all tokens and all tokens see them.

    The rows of global tokens have projections of their own: maps of each head's q and k, which
    begin as the identity (the published model starts its own as copies, too). Values have none,
    so that every output is an average of v.
    """

    traits = Traits(causal="no", cross=False, positions="absolute")
    source = "Beltagy et al., 2020"
    formula = (
        "out_i = Σ_j softmax_j(q_i·k_j / √d) v_j over |i − j| ≤ window/2 or j < global_tokens; "
        "for i < global_tokens: softmax_j(A q_i · B k_j / √d) over all j"
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        window: int = 512,
        global_tokens: int = 1,
        impl: str = "auto",
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads, window=window, impl=impl)
        self.global_tokens = check_whole("global_tokens", global_tokens, 0)
        self.global_query = nn.Parameter(torch.eye(width).repeat(heads, 1, 1))  # A: [H D D]
        self.global_key = nn.Parameter(torch.eye(width).repeat(self.key_heads, 1, 1))  # B

    def pattern(self, keys: int, device: torch.device) -> Kept:
        near, count = super().pattern(keys, device), self.global_tokens
        return lambda i, j: near(i, j) | (j < count)

    def parts(self, sizes: Sizes, device: torch.device) -> tuple[Part, ...]:
        near, count = super().pattern(sizes.keys, device), min(self.global_tokens, sizes.keys)
        window = self.part(sizes, lambda i, j: near(i, j) & (j >= count))
        return (window, columns(range(count), sizes)) if count else (window,)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        mask = request.key_mask
        q = hide(q, mask)
        weights = super().dense(q, k, request)
        real = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        query, key = self._global(q, k)
        rows = ((ranks(real) < self.global_tokens) & real)[:, None, :, None]
        return torch.where(rows, masked_softmax(query @ key.mT, real[:, None, None]), weights)

    def pairs(self, length: int) -> int:
        return length * min(2 * self.reach + 1 + 2 * self.global_tokens, length)

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        out = super()._sparse(q, k, v, request, impl)
        rows, mask = q[:, :, : self.global_tokens], request.key_mask
        real = torch.ones_like(k[:1, 0, :, 0], dtype=torch.bool) if mask is None else mask
        dtype = compute_dtype(q.dtype)
        query, key = (x.to(dtype) for x in self._global(rows, k))
        weights = masked_softmax(query @ key.mT, real[:, None, None])
        first = (weights @ repeat_heads(v, q).to(dtype)).to(q.dtype)
        return torch.cat([first, out[:, :, self.global_tokens :]], 2)

    def _global(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of global rows, A q/√d and B k."""
        query = q @ self.global_query.to(q.dtype).mT
        key = k @ self.global_key.to(k.dtype).mT
        return query / math.sqrt(self.width), repeat_heads(key, q)


def half(window: int) -> int:
    """How many tokens a window reaches to either side; an odd window is refused."""
    check_whole("window", window, 0)
    if window % 2:
        raise ValueError(f"window must be even: half of it lies on either side; got {window}")
    return window // 2


def block_for(reach: int) -> int:
    """The size of blocks: small, so that few keys are read in vain, but not too small."""
    return min(128, max(16, 2 ** math.ceil(math.log2(max(reach, 1) / 2 + 1))))
