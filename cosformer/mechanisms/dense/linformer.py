"""Linformer ("Linformer: Self-Attention with Linear Complexity", Wang et al., 2020)."""

import math

import torch
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.padding import ranks, real_first, take
from cosformer.mechanisms.request import Request, repeat_heads
from cosformer.mechanisms.sdpa import by_products
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.runtime import long_dtype


class Linformer(Mechanism):
    """Softmax over a fixed number of learned mixtures of the tokens.

    Padding is absent: real tokens close up and zeros stand behind them, before E and F.
    """

    traits = Traits(causal="no", positions="absolute", max_length=512, normalised=False)
    source = "Wang et al., 2020 (E and F shared by the heads)"
    formula = "out = softmax(Q (E K)ᵀ/√d) (F V), E and F learned [projected, max_length]"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        max_length: int = 512,
        projected: int = 256,
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.projected = check_whole("projected", projected, 1)
        self.set_max_length(max_length)
        shape = projected, max_length
        self.key_mix = nn.Parameter(torch.randn(shape) / math.sqrt(projected))  # E
        self.value_mix = nn.Parameter(torch.randn(shape) / math.sqrt(projected))  # F

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        dtype, mask = long_dtype(q), request.key_mask
        k, v = k.to(dtype), v.to(dtype)
        if mask is not None:
            order = real_first(mask)
            k, v = take(k, order), take(v, order)
        mixed_k = self._mix(self.key_mix, k)  # [B H_kv projected D]
        mixed_v = self._mix(self.value_mix, v)
        keys, values = repeat_heads(mixed_k, q), repeat_heads(mixed_v, q)
        return by_products(q.to(dtype), keys, values, self.width**-0.5).to(q.dtype)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        mix_k, mix_v = (
            x[None, :, : k.shape[2]].to(q.dtype) for x in (self.key_mix, self.value_mix)
        )
        if request.key_mask is not None:
            rank, real = ranks(request.key_mask), request.key_mask[:, None]
            mix_k, mix_v = (x[0][:, rank].movedim(0, 1) * real for x in (mix_k, mix_v))
        keys = mix_k[:, None] @ repeat_heads(k, q)
        return (q @ keys.mT / math.sqrt(self.width)).softmax(-1) @ mix_v[:, None]

    def cost(self, length: int) -> Cost:
        mixing = 4 * self.key_heads * length * self.projected * self.width
        scores = self.heads * length * self.projected * (4 * self.width + 5)
        return Cost(mixing + scores, 4 * (self.numbers(length) + 2 * self.projected * length))

    def _mix(self, mix: Tensor, x: Tensor) -> Tensor:
        """Σ_t mix_pt x_t, one product for all items and heads."""
        batch, heads, length, width = x.shape
        columns = x.permute(2, 0, 1, 3).flatten(1)  # [S B·H·D]
        mixed = mix[:, :length].to(x.dtype) @ columns
        return mixed.unflatten(1, (batch, heads, width)).permute(1, 2, 0, 3)
