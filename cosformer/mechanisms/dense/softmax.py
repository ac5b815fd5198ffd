"""Softmax attention ("Attention Is All You Need", Vaswani et al., 2017), PyTorch's own."""

import math
from typing import Any

from torch import Tensor

from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.cache import HeldCache
from cosformer.mechanisms.dense.softmax_token import SoftmaxToken
from cosformer.mechanisms.request import Request, Split, repeat_heads, seen
from cosformer.mechanisms.sdpa import masked_softmax, sdpa, sdpa_for, sdpa_to_the_last
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.ops import After, Clock, Layout


class Softmax(Mechanism):
    """Softmax attention through `scaled_dot_product_attention`."""

    traits = Traits(causal="exact", state="cache", second_derivative=False, growth="n²")
    source = "Vaswani et al., 2017"
    formula = "out_i = Σ_j softmax_j(q_i·k_j / √d) v_j"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        return sdpa_for(q, k, v, request)

    def prepared(
        self, state: Any, layout: Layout, after: After, clock: Clock, base: float | None
    ) -> SoftmaxToken | None:
        if SoftmaxToken.serves(state, base):
            return SoftmaxToken(layout, state, after, clock, base)
        return None

    def attend_held(self, q: Tensor, state: HeldCache) -> Tensor:
        if q.is_cuda:
            return sdpa(q, state.k, state.v, attn_mask=self.seen_held(state)[:, None, None])
        last, seen = int(state.position.max()), None  # on a CPU this costs no wait
        if len(q) > 1 and int(state.position.min()) < last:
            seen = self.seen_held(state)[:, None, None, : last + 1]
        return sdpa(q, state.k[:, :, : last + 1], state.v[:, :, : last + 1], attn_mask=seen)

    def attend_split(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, split: Split
    ) -> Tensor:
        """Every rank gathers all keys and values, which grow with the length."""
        start, k, v = split.start(q.shape[2]), split.gather(k, 2), split.gather(v, 2)
        mask = None if request.key_mask is None else split.gather(request.key_mask, 1)
        if request.causal:  # nobody here sees the keys of later ranks
            end = max(start + q.shape[2], 1)
            k, v, mask = k[:, :, :end], v[:, :, :end], None if mask is None else mask[:, :end]
            if mask is None:
                return sdpa_to_the_last(q, k, v)
        return sdpa_for(q, k, v, request._replace(key_mask=mask, start=start))

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        score = q @ repeat_heads(k, q).mT / math.sqrt(self.width)
        return masked_softmax(score, seen(request, q.shape[2], k.shape[2], q.device))

    def cost(self, length: int) -> Cost:
        return self.cost_of_pairs(length, length**2)
