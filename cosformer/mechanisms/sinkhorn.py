"""Sparse Sinkhorn attention ("Sparse Sinkhorn Attention", Tay et al., 2020)."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.mechanisms.traits import Cost
from cosformer.mechanisms.whole import Whole
from cosformer.ops.check import check_positive, check_whole

LOWEST = -1e30  # a logit that takes no part; finite, so that gradients are


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
        own, moved, mixing, total = self._weights(q, k, causal)
        values = self._split(v)
        out = own @ values + moved @ _mix(mixing, total, values)
        return out.flatten(2, 3)[:, :, : q.shape[2]]

    def dense_whole(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        own, moved, mixing, total = self._weights(q, k, causal)
        length, blocks = q.shape[2], own.shape[2]
        real = self._real(length, q.device)
        shares = mixing[..., None] * real / torch.where(total > 0, total, 1)[..., None, :]
        same = torch.eye(blocks, dtype=q.dtype, device=q.device)
        weights = torch.einsum("bhitp,bhijp->bhitjp", moved, shares)
        weights = weights + torch.einsum("bhitp,ij->bhitjp", own, same)
        return weights.flatten(4, 5).flatten(2, 3)[:, :, :length, :length]

    def cost(self, length: int) -> Cost:
        blocks = -(-length // self.block)
        pairs = length * 2 * self.block * (4 * self.width + 5)
        mixing = blocks**2 * (4 * self.block * self.width + 10 * self.iterations)
        numbers = (4 * self.heads + 2 * self.key_heads) * length * self.width
        return Cost(self.heads * (pairs + mixing), 4 * (numbers + self.heads * blocks**2))

    def _weights(self, q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of own and mixed tokens `[B, H, N, b, b]`, of blocks `[B, H, N, N]`, sums `[B, H, N, b]`.

        The sums are those of a row's weights over the blocks that have a p-th token: all of them
        but the last, perhaps.
        """
        length = q.shape[2]
        real = self._real(length, q.device)  # [N b]
        mixing = self._permutation(q, k, causal)
        total = mixing @ real.to(q.dtype)
        rows, keys = self._split(q) / math.sqrt(self.width), self._split(k)
        seen = real[:, None]
        if causal:
            seen = seen & torch.ones_like(seen[0]).expand(self.block, -1).tril()
        own = (rows @ keys.mT).masked_fill(~seen, -math.inf)
        moved = (rows @ _mix(mixing, total, keys).mT).masked_fill(
            ~(total > 0)[..., None, :], -math.inf
        )
        both = torch.cat([own, moved], -1).softmax(-1)
        return both[..., : self.block], both[..., self.block :], mixing, total

    def _permutation(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        """P; rows sum to 1, the first one to 0 if causal."""
        length, block = q.shape[2], self.block
        count = self._real(length, q.device).sum(1)[:, None]
        keys = self._split(k).sum(3) / count
        scale = self.temperature * math.sqrt(self.width)
        if not causal:
            logits = self._split(q).sum(3) / count @ keys.mT / scale
            for _ in range(self.iterations):
                logits = logits - logits.logsumexp(-2, keepdim=True)
                logits = logits.log_softmax(-1)
            return logits.exp()
        first = torch.arange(block, max(length, block), block, device=q.device)
        if not len(first):
            return q.new_zeros(*q.shape[:2], 1, 1)
        rows = q.cumsum(2)[:, :, first] / (first + 1)[:, None]
        logits = rows @ keys[:, :, :-1].mT / scale
        future = torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1)
        for _ in range(self.iterations):
            logits = logits.masked_fill(future, LOWEST)
            logits = logits - _logcumsumexp(logits)
            logits = logits.masked_fill(future, LOWEST).log_softmax(-1)
        return F.pad(logits.exp().masked_fill(future, 0), (0, 1, 1, 0))

    def _split(self, x: Tensor) -> Tensor:
        """Blocks `[B, H, N, b, D]`, zeros behind the last token."""
        padded = F.pad(x, (0, 0, 0, -x.shape[2] % self.block))
        return padded.unflatten(2, (-1, self.block))

    def _real(self, length: int, device: torch.device) -> Tensor:
        index = torch.arange(length + -length % self.block, device=device)
        return (index < length).unflatten(0, (-1, self.block))


def _mix(mixing: Tensor, total: Tensor, blocks: Tensor) -> Tensor:
    """Σ_j P_ij x_jp / Σ_j P_ij, over the blocks j that have a p-th token."""
    mixed = (mixing @ blocks.flatten(3)).unflatten(3, blocks.shape[3:])
    return mixed / torch.where(total > 0, total, 1)[..., None]


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
