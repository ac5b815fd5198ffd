"""Linear attention under rotary positions ("RoFormer", Su et al., 2021)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_positive
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.linear.family import LinearMechanism, check_sums
from cosformer.mechanisms.linear.groups import ALIGNED, quotient
from cosformer.mechanisms.request import NO_CONTROLS, Controls, Request
from cosformer.mechanisms.traits import Cost
from cosformer.ops import (
    State,
    linear_attention,
    linear_attention_step,
    linear_attention_with_state,
)
from cosformer.ops.features import rotated_features
from cosformer.runtime import full_precision

Attend = Callable[[str, Tensor, Tensor, Tensor, str], Tensor]


def check_rotary(width: int, base: float) -> None:
    """Refuse what rotary positions cannot turn."""
    if width % 2:
        raise ValueError(f"width must be even for rotary positions, got {width}")
    check_positive("base", base)


class TwoSums(NamedTuple):
    """The state of a stream: the sums above the fraction bar, and those below it."""

    above: State
    below: State
    owner: str  # the class of the mechanism


class RopeLinear(Mechanism):
    """Linear attention with rotary positions above the fraction bar, and none below it."""

    traits = replace(LinearMechanism.traits, positions="relative", normalised=False)
    source = "Su et al., 2021 (RoFormer, linear attention)"
    formula = (
        "out_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / max(Σ_j φ(q_i)·φ(k_j), 10⁻⁶), φ = 1 + elu, "
        "R_i a rotation of pairs by i·base^(−2n/d)"
    )
    state_type = TwoSums
    eps = 1e-6

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, base: float = 1e4
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        check_rotary(width, base)
        self.base = base

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        return self._attend(q, k, v, request, "auto")

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
        return TwoSums(above, below, self.owner)

    def check_state(self, state: Any, k: Tensor, v: Tensor) -> None:
        super().check_state(state, k, v)
        check_sums(state.above, k, self.width, v.shape[3])
        check_sums(state.below, k, self.width, 1)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, TwoSums]:
        after: dict[str, State] = {}

        def attend(part: str, q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
            out, after[part] = linear_attention_with_state(
                q,
                k,
                v,
                state=getattr(state, part),
                feature_map=feature_map,
                normaliser="none",
                key_mask=request.key_mask,
            )
            return out

        start = state.above.position
        out = self._quotient(q, k, v, start, start, attend, columns=1)
        return out, state._replace(**after)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, controls: Controls = NO_CONTROLS
    ) -> tuple[Tensor, TwoSums]:
        def attend(part: str, q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
            sums = getattr(state, part)
            return linear_attention_step(q, k, v, sums, feature_map=feature_map, normaliser="none")

        start = state.above.position
        with full_precision(q):
            return self._quotient(q, k, v, start, start, attend, columns=1), state

    def state_size(self, length: int) -> int:
        return self.key_heads * self.width * (self.value_width + 1)

    def cost(self, length: int) -> Cost:
        tokens = (self.heads + self.key_heads) * length * self.width
        operations = 4 * self.heads * length * self.width * (self.width + 1) + 5 * tokens
        return Cost(operations, 3 * 4 * tokens)  # inputs and output, rotated features

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        def attend(part: str, q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
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

        columns = ALIGNED if v.is_cuda else 1
        return self._quotient(q, k, v, request.start, 0, attend, columns)

    def _quotient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start: int | Tensor,
        key_start: int | Tensor,
        attend: Attend,
        columns: int,
    ) -> Tensor:
        """Both sums by `attend`, divided; those below have values of 1 in so many columns.

        They are not divided yet, and float16 would not reach as far: it is computed in float32.
        """
        dtype = v.dtype
        q, k, v = (x.float() if dtype == torch.float16 else x for x in (q, k, v))
        ones = v.new_ones(v.shape[2], columns).expand(*v.shape[:2], -1, -1)
        turned_q = rotated_features(q, query_start, self.base)
        turned_k = rotated_features(k, key_start, self.base)
        # The part below moves its state on, and with it nothing that the part above reads.
        above = attend("above", turned_q, turned_k, v, "identity")
        below = attend("below", q, k, ones, "1+elu")
        return quotient(above, below[..., :1], "clamp", self.eps).to(dtype)
