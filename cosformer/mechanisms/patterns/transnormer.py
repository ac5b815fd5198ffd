"""TransNormer ("The Devil in Linear Transformer", Qin et al., EMNLP 2022)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.cache import Cache, HeldCache
from cosformer.mechanisms.padding import ranks, real_first, take, to_multiple, with_real_first
from cosformer.mechanisms.request import Request, repeat_heads
from cosformer.mechanisms.sdpa import masked_softmax, sdpa, sdpa_for
from cosformer.mechanisms.traits import Cost, Traits


class TransNormerLocal(Mechanism):
    """TransNormer's early layers: softmax within blocks, which see nothing of each other.

    Blocks count real tokens: one behind `key_mask` is absent, as a key and as a query (its output
    is 0), so that padding does not shift them.
    """

    traits = Traits(
        causal="exact", cross=False, state="window", positions="absolute", second_derivative=False
    )
    source = "Qin et al., EMNLP 2022 (DiagAttention)"
    formula = "out_i = Σ_j softmax_j(q_i·k_j/√d) v_j over j in the block of i, ⌊j/b⌋ = ⌊i/b⌋"

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, block: int = 64
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.set_block(block)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            inputs = (q, repeat_heads(k, q), repeat_heads(v, q))
            rows, keys, values = (self._blocks(x) for x in inputs)
            out = self._softmax(rows, keys, values, self._real(k, mask), request.causal)
            whole = q.shape[2] + -q.shape[2] % self.block
            out = out.reshape(*q.shape[:2], whole, v.shape[3])
            return out if whole == q.shape[2] else out[:, :, : q.shape[2]]

        start = request.start
        if request.key_mask is not None:
            return with_real_first(attend, request.key_mask, q, k, v, start)
        rows = F.pad(q, (0, 0, start, 0)) if start else q
        return attend(rows, k, v, None)[:, :, start:]

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        score = q @ repeat_heads(k, q).mT / self.width**0.5
        mask = request.key_mask
        index = torch.arange(k.shape[2], device=k.device)[None] if mask is None else ranks(mask)
        block = index // self.block
        allowed = (block[:, :, None] == block[:, None])[:, None]  # [B or 1, 1, T, S]
        if request.causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask[:, None, None] & mask[:, None, :, None]
        return masked_softmax(score, allowed)

    def forget(self, cache: Cache) -> Cache:
        """The tokens of the block that is not finished; in a padded batch each item has its own."""
        mask = cache.key_mask
        if mask is None:
            return super().forget(cache)
        finished = mask.sum(1, keepdim=True) // self.block * self.block
        begun = mask & (ranks(mask) >= finished)
        order = real_first(~begun)[:, max(0, mask.shape[1] - self.block + 1) :]
        kept = take(cache.k, order), take(cache.v, order), begun.gather(1, order)
        return Cache(*kept, cache.position, cache.owner)

    def keep(self, position: int) -> int:
        return position % self.block

    def held_length(self, length: int) -> int:
        return self.block

    def attend_held(self, q: Tensor, state: HeldCache) -> Tensor:
        return sdpa_for(q, state.k, state.v, Request(False, self.seen_held(state), 0, {}))

    def seen_held(self, state: HeldCache) -> Tensor:
        return state.entries() <= state.position[:, None] % self.block

    def cost(self, length: int) -> Cost:
        return self.cost_of_pairs(length, length * self.block)

    def _blocks(self, x: Tensor) -> Tensor:
        """`[B, H, T, ·]` as `[B·H·n, 1, block, ·]`, or `[B·H, n, block, ·]` on a GPU.

        Heads come back interleaved on a CPU, which would copy them and their gradients; a GPU has
        a limit on items.
        """
        x = to_multiple(x, self.block).unflatten(2, (-1, self.block)).flatten(0, 1)
        return x if x.is_cuda else x.flatten(0, 1).unsqueeze(1)

    def _real(self, k: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """Which keys of `_blocks` are real: not masked, and not there to fill up the last block."""
        if key_mask is None:
            if k.shape[2] % self.block == 0:
                return None
            key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        real = key_mask[:, None, :, None].expand(-1, self.heads, -1, -1)
        return self._blocks(real).mT

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        if mask is None:
            return sdpa(q, k, v, is_causal=causal)
        if causal:
            size = (self.block, self.block)
            mask = mask & torch.ones(size, dtype=torch.bool, device=q.device).tril()
        out = sdpa(q, k, v, attn_mask=mask)
        return out.masked_fill(~mask.any(-1, keepdim=True), 0)
