"""Sparse Sinkhorn attention ("Sparse Sinkhorn Attention", Tay et al., 2020)."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.mechanisms.fused import without_cudnn
from cosformer.mechanisms.traits import Cost
from cosformer.mechanisms.whole import Whole
from cosformer.ops.check import check_positive, check_whole
from cosformer.ops.problem import compute_dtype
from cosformer.ops.running_share import running_share


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
        if q.dtype != compute_dtype(q.dtype):
            return self._attend_fused(q, k, v, causal)
        own, moved, mixing, total = self._weights(q, k, causal)
        values = self._split(v)
        out = own @ values + moved @ _mix(mixing, total, values)
        return out.flatten(2, 3)[:, :, : q.shape[2]]

    def _attend_fused(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The same, with a block's own and mixed tokens side by side in PyTorch's attention.

        It is given blocks as heads, so that each has a mask of its own.
        """
        length = q.shape[2]
        real = self._real(length, q.device)
        mixing = self._permutation(q, k, causal)
        total = None if causal or length % self.block == 0 else mixing @ real.to(mixing.dtype)
        mixing = mixing.to(q.dtype)
        keys, values = (
            torch.cat([x, _mix(mixing, total, x)], 3).flatten(0, 1)  # [B·H N 2b D]
            for x in (self._split(k), self._split(v))
        )
        seen = self._seen(real, causal)
        rows = self._split(q).flatten(0, 1)
        with without_cudnn(q):
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen[None])
        return out.unflatten(0, q.shape[:2]).flatten(2, 3)[:, :, :length]

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
        dtype = compute_dtype(q.dtype)
        keys = self._split(k).sum(3, dtype=dtype) / count
        scale = self.temperature * math.sqrt(self.width)
        if not causal:
            logits = self._split(q).sum(3, dtype=dtype) / count @ keys.mT / scale
            for _ in range(self.iterations):
                logits = logits - logits.logsumexp(-2, keepdim=True)
                logits = logits.log_softmax(-1)
            return logits.exp()
        if length <= block:
            return keys.new_zeros(*q.shape[:2], 1, 1)
        queries = self._split(q)
        before = queries.sum(3, dtype=dtype)[:, :, :-1].cumsum(2)
        first = torch.arange(block, length, block, device=q.device)[:, None]
        rows = (before + queries[:, :, :, 0][:, :, 1:]) / (first + 1)
        logits = rows @ keys[:, :, :-1].mT / scale
        for _ in range(self.iterations):
            logits = running_share(logits).log_softmax(-1)
        return F.pad(logits.exp().tril(), (0, 1, 1, 0))

    def _split(self, x: Tensor) -> Tensor:
        """Blocks `[B, H, N, b, D]`, zeros behind the last token."""
        missing = -x.shape[2] % self.block
        return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (-1, self.block))

    def _real(self, length: int, device: torch.device) -> Tensor:
        index = torch.arange(length + -length % self.block, device=device)
        return (index < length).unflatten(0, (-1, self.block))

    def _seen(self, real: Tensor, causal: bool) -> Tensor:
        """Whether a query sees an own or a mixed token, `[N, b, 2b]`, from `_real`."""
        own = real[:, None].expand(-1, self.block, -1)
        mixed = real[:1].expand_as(real)  # the first block has all tokens that any has
        if causal:
            own = own.tril()
            mixed = mixed & (torch.arange(len(real), device=real.device) > 0)[:, None]
        return torch.cat([own, mixed[:, None].expand_as(own)], 2)


def _mix(mixing: Tensor, total: Tensor | None, blocks: Tensor) -> Tensor:
    """Σ_j P_ij x_jp / Σ_j P_ij, over the blocks j that have a p-th token; None: sums are 1 or 0."""
    mixed = (mixing @ blocks.flatten(3)).unflatten(3, blocks.shape[3:])
    if total is None:
        return mixed
    return (mixed / torch.where(total > 0, total, 1)[..., None]).to(blocks.dtype)
