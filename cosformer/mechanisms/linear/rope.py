"""Linear attention under rotary positions ("RoFormer", Su et al., 2021)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_positive
from cosformer.mechanisms.base import Mechanism, Request
from cosformer.mechanisms.linear.family import LinearMechanism
from cosformer.mechanisms.linear.groups import far_reaching, ones
from cosformer.mechanisms.traits import Cost
from cosformer.ops import State, divided, linear_attention, linear_attention_with_state
from cosformer.ops.features.quotient import quotient
from cosformer.ops.features.rotary import rotated_features


def check_rotary(width: int, base: float) -> None:
    if width % 2:
        raise ValueError(f"width must be even for rotary positions, got {width}")
    check_positive("base", base)


class TwoSums(NamedTuple):
    """The state of a stream: what is divided, and by what."""

    above: State
    below: State


class RopeLinear(Mechanism):
    """Linear attention with rotary positions above the fraction bar, and none below it."""

    traits = replace(LinearMechanism.traits, positions="relative", normalised=False)
    source = "Su et al., 2021 (RoFormer, linear attention)"
    formula = (
        "out_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / max(Σ_j φ(q_i)·φ(k_j), 10⁻⁶), φ = 1 + elu, "
        "R_i a rotation of pairs by i·base^(−2n/d)"
    )

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, base: float = 1e4
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        check_rotary(width, base)
        self.base = base
        self.eps = 1e-6

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        if not divided.is_served(q, k, request.start):
            return self._attend(q, k, v, request, "auto")
        q, k, values = (far_reaching(x) for x in (q, k, v))
        setting = divided.Setting(request.causal, self.base, self.eps)
        q, k = divided.by_kernel(q, k, request.key_mask, setting)  # a masked key has no features
        out = linear_attention(
            q, k, values, feature_map="identity", causal=request.causal, normaliser="none"
        )
        return out.to(v.dtype)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        if not k.shape[2]:
            return q.new_zeros(*q.shape[:3], 0)
        identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        return self._attend(q, k, identity.expand(*k.shape[:2], -1, -1), request, "reference")

    def empty_state(self, k: Tensor, v: Tensor) -> TwoSums:
        k, v = k[:, :, :0], v[:, :, :0]
        above, below = (
            linear_attention_with_state(k, k, x, normaliser="none")[1] for x in (v, k[..., :1])
        )
        return TwoSums(above, below)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, TwoSums]:
        if not isinstance(state, TwoSums):
            raise TypeError(f"state must be TwoSums, got {type(state).__name__}")
        states: list[State] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
            out, after = linear_attention_with_state(
                q,
                k,
                v,
                state=state[len(states)],
                feature_map=feature_map,
                normaliser="none",
                key_mask=request.key_mask,
            )
            states.append(after)
            return out

        start = state.above.position
        one = ones(v)[..., :1]  # a state has no room for more
        return self._quotient(q, k, v, one, start, start, attend), TwoSums(*states)

    def state_size(self, length: int) -> int:
        return self.key_heads * self.width * (self.value_width + 1)

    def cost(self, length: int) -> Cost:
        tokens = (self.heads + self.key_heads) * length * self.width
        operations = 4 * self.heads * length * self.width * (self.width + 1) + 5 * tokens
        return Cost(operations, 3 * 4 * tokens)  # inputs and output, rotated features

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
            return linear_attention(
                q,
                k,
                v,
                feature_map=feature_map,
                causal=request.causal,
                normaliser="none",
                key_mask=request.key_mask,
                query_start=request.start,
                impl=impl,
            )

        one = ones(v) if v.is_cuda else ones(v)[..., :1]
        return self._quotient(q, k, v, one, request.start, 0, attend)

    def _quotient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        one: Tensor,
        query_start: int | Tensor,
        key_start: int | Tensor,
        attend: Callable[[Tensor, Tensor, Tensor, str], Tensor],
    ) -> Tensor:
        q, k, values, one = (far_reaching(x) for x in (q, k, v, one))
        turned_q = rotated_features(q, query_start, self.base)
        turned_k = rotated_features(k, key_start, self.base)
        above = attend(turned_q, turned_k, values, "identity")
        below = attend(q, k, one, "1+elu")
        return quotient([above], [below], v.shape[-1], "clamp", self.eps).to(v.dtype)
