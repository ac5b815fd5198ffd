"""Sparse Sinkhorn attention ("Sparse Sinkhorn Attention", Tay et al., 2020)."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.check import check_positive, check_whole
from cosformer.mechanisms.padding import to_multiple
from cosformer.mechanisms.sdpa import LOWEST, by_products, masked_softmax
from cosformer.mechanisms.traits import Cost
from cosformer.mechanisms.whole import Whole
from cosformer.runtime import compute_dtype


class Sinkhorn(Whole):
    """Each block attends to itself and to one block that a soft permutation mixes for it.

    No noise is added to the logits. Causal: block i mixes blocks before it alone, is summed up by
    the queries as far as its first token, and columns are normalised over the rows so far, so that
    no weight depends on the future.
    """

    traits = replace(Whole.traits, causal="exact", multiple_of=64, growth="n²")
    source = "Tay et al., ICML 2020"
    formula = (
        "out = softmax(Q [K ; PK]ᵀ/√d) [V ; PV] in blocks; "
        "P = exp(q̄_i·k̄_j /(τ√d)), its columns and rows normalised in turn; q̄, k̄ block means"
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        block: int = 64,
        iterations: int = 8,
        temperature: float = 0.75,
    ) -> None:
        """n · 2 block pairs, and n² d/block operations to mix blocks."""
        super().__init__(heads, width, key_heads=key_heads)
        self.set_block(block)
        self.iterations = check_whole("iterations", iterations, 1)
        self.temperature = check_positive("temperature", temperature)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        rows, seen, shares = self._split(q), self._seen(q, causal), self._shares(q, k, causal)
        keys, values = (_beside(self._split(x), shares) for x in (k, v))
        out = by_products(rows, keys, values, self.width**-0.5, seen)
        return out.flatten(2, 3)[:, :, : q.shape[2]]

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        shares = self._shares(q, k, causal)
        keys = _beside(self._split(k), shares)
        scores = self._split(q) / math.sqrt(self.width) @ keys.mT
        weights = masked_softmax(scores, self._seen(q, causal))  # [B H N b 2b]
        own, moved = weights.split(self.block, -1)
        taken = torch.cat([x[..., None].expand(*x.shape, count) for x, count in shares], -1)
        same = torch.eye(own.shape[2], dtype=q.dtype, device=q.device)
        dense = torch.einsum("bhitp,bhijp->bhitjp", moved, taken)
        dense = dense + torch.einsum("bhitp,ij->bhitjp", own, same)
        return dense.flatten(4, 5).flatten(2, 3)[:, :, : q.shape[2], : q.shape[2]]

    def cost(self, length: int) -> Cost:
        blocks = -(-length // self.block)
        pairs = length * 2 * self.block * (4 * self.width + 5)
        mixing = blocks**2 * (4 * self.block * self.width + 10 * self.iterations)
        numbers = (4 * self.heads + 2 * self.key_heads) * length * self.width
        return Cost(self.heads * (pairs + mixing), 4 * (numbers + self.heads * blocks**2))

    def _shares(self, q: Tensor, k: Tensor, causal: bool) -> list[tuple[Tensor, int]]:
        """Shares P of blocks in the mixed ones, `[B, H, N, N]`, and for how many tokens of a block.

        Where the last block is not full, the tokens that it lacks are mixed from the other blocks
        alone: their shares are made of logarithms, as they may be too small for a number. Causal,
        no block takes from the last one.
        """
        log, rest = self._log_permutation(q, k, causal), q.shape[2] % self.block
        if causal or rest == 0:
            return [(log.exp().to(q.dtype), self.block)]
        others = F.pad(log[..., :-1].softmax(-1), (0, 1))
        return [(log.exp().to(q.dtype), rest), (others.to(q.dtype), self.block - rest)]

    def _log_permutation(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        """log P; rows of P sum to 1, the first one to 0 if causal."""
        length, block = q.shape[2], self.block
        count = self._real(length, q.device).sum(1)[:, None]
        dtype = compute_dtype(q.dtype)
        keys = self._split(k).sum(3, dtype=dtype) / count
        scale = self.temperature * math.sqrt(self.width)
        if not causal:
            logits = self._split(q).sum(3, dtype=dtype) / count @ keys.mT / scale
            for _ in range(self.iterations):
                logits = logits - logits.logsumexp(-2, keepdim=True)
                logits = logits.log_softmax(-1)
            return logits
        if length <= block:
            return keys.new_full((*q.shape[:2], 1, 1), LOWEST)
        queries = self._split(q)
        before = queries.sum(3, dtype=dtype)[:, :, :-1].cumsum(2)
        first = torch.arange(block, length, block, device=q.device)[:, None]
        rows = (before + queries[:, :, :, 0][:, :, 1:]) / (first + 1)
        logits = rows @ keys[:, :, :-1].mT / scale
        for _ in range(self.iterations):
            logits = running_share(logits).log_softmax(-1)
        return F.pad(logits, (0, 1, 1, 0), value=LOWEST)

    def _split(self, x: Tensor) -> Tensor:
        """Blocks `[B, H, N, b, D]`, zeros behind the last token."""
        return to_multiple(x, self.block).unflatten(2, (-1, self.block))

    def _real(self, length: int, device: torch.device) -> Tensor:
        index = torch.arange(length + -length % self.block, device=device)
        return (index < length).unflatten(0, (-1, self.block))

    def _seen(self, q: Tensor, causal: bool) -> Tensor:
        """Whether a query sees an own or a mixed token, `[N, b, 2b]`."""
        real = self._real(q.shape[2], q.device)
        own = real[:, None].expand(-1, self.block, -1)
        mixed = real[:1].expand_as(real)  # the first block has all tokens that any has
        if causal:
            own = own.tril()
            mixed = mixed & (torch.arange(len(real), device=real.device) > 0)[:, None]
        return torch.cat([own, mixed[:, None].expand_as(own)], 2)


def _beside(blocks: Tensor, shares: list[tuple[Tensor, int]]) -> Tensor:
    """Tokens `[B, H, N, b, D]`, and behind each block's own the mixed ones, Σ_j P_ij x_jp."""
    parts = blocks.split([count for _, count in shares], 3) if len(shares) > 1 else [blocks]
    mixed = [
        (share @ part.flatten(3)).unflatten(3, part.shape[3:])
        for (share, _), part in zip(shares, parts, strict=True)
    ]
    return torch.cat([blocks, *mixed], 3)


def running_share(x: Tensor) -> Tensor:
    """x_ij − log Σ_{j ≤ t ≤ i} exp(x_tj) of `[…, n, n]` where j ≤ i, and `LOWEST` elsewhere.

    This is the logarithm of the share that row i has in the sum of a column so far.
    """
    future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    x = x.masked_fill(future, LOWEST)
    return (x - _logcumsumexp(x)).masked_fill(future, LOWEST)


def _logcumsumexp(x: Tensor) -> Tensor:
    """y_i = log Σ_{t ≤ i} exp(x_t) along the rows, by sums of 1, 2, 4, … of them.

    PyTorch's has no second derivative where the incoming gradient is 0: here its result is the
    constant that keeps every exponent from overflowing.
    """
    y = x.detach().logcumsumexp(-2)
    total = (x - y).exp()  # Σ exp(x_t − y_i), of row i alone as yet
    reach = 1
    while reach < x.shape[-2]:
        share = (y[..., :-reach, :] - y[..., reach:, :]).exp()
        total = total + F.pad(share * total[..., :-reach, :], (0, 0, reach, 0))
        reach *= 2
    return y + total.log()
