"""Linear attention under rotary positions ("RoFormer", Su et al., 2021)."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cosformer.ops as ops
from cosformer.check import check_positive
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.linear.family import LinearMechanism, Start
from cosformer.mechanisms.linear.groups import ALIGNED, quotient
from cosformer.mechanisms.request import NO_CONTROLS, Controls, Request
from cosformer.mechanisms.traits import Cost
from cosformer.ops.features import rotated_features
from cosformer.runtime import full_precision, renewed


def check_rotary(width: int, base: float) -> None:
    """Refuse what rotary positions cannot turn; `width` is that of a head."""
    if width % 2:
        raise ValueError(f"a head's width must be even for rotary positions, got {width}")
    check_positive("base", base)


class TwoSums(NamedTuple):
    """The state of a stream: the sums above the fraction bar, and those below it."""

    above: ops.State
    below: ops.State
    owner: str  # the class of the mechanism


class RopeLinear(LinearMechanism):
    """Linear attention with rotary positions above the fraction bar, and none below it."""

    traits = replace(LinearMechanism.traits, positions="relative", normalised=False)
    source = "Su et al., 2021 (RoFormer, linear attention)"
    formula = (
        "out_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / max(Σ_j φ(q_i)·φ(k_j), 10⁻⁶), φ = 1 + elu, "
        "R_i a rotation of pairs by i·base^(−2n/d)"
    )
    state_type = TwoSums
    normaliser = "none"  # of either sum: their quotient is made here

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, base: float = 1e4
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        check_rotary(width, base)
        self.base = base

    def empty_state(self, k: Tensor, v: Tensor) -> TwoSums:
        k, v = k[:, :, :0], v[:, :, :0]
        above, below = (
            ops.linear_attention_with_state(k, k, x, normaliser="none")[1] for x in (v, k[..., :1])
        )
        return TwoSums(above, below, self.owner)

    def check_state(self, state: Any, k: Tensor, v: Tensor) -> None:
        Mechanism.check_state(self, state, k, v)
        ops.check_state_shape(state.above, k, self.width, v.shape[3])
        ops.check_state_shape(state.below, k, self.width, 1)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, TwoSums]:
        start, mask = state.above.position, request.key_mask
        upper, lower = self._sides(q, k, v, start, start)
        above, after = ops.linear_attention_with_state(**upper, state=state.above, key_mask=mask)
        below, since = ops.linear_attention_with_state(**lower, state=state.below, key_mask=mask)
        return self._divide(above, below, v), renewed(state, above=after, below=since)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, controls: Controls = NO_CONTROLS
    ) -> tuple[Tensor, TwoSums]:
        start = state.above.position
        with full_precision(q):
            upper, lower = self._sides(q, k, v, start, start)
            above, below = self._take(upper, state.above), self._take(lower, state.below)
            return self._divide(above, below, v), state

    def state_size(self, length: int) -> int:
        return self.key_heads * self.width * (self.value_width + 1)

    def cost(self, length: int) -> Cost:
        tokens = (self.heads + self.key_heads) * length * self.width
        operations = 4 * self.heads * length * self.width * (self.width + 1) + 5 * tokens
        return Cost(operations, 3 * 4 * tokens)  # inputs and output, rotated features

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        options = request.options | {"impl": impl}
        sides = self._sides(q, k, v, request.start, 0, ALIGNED if v.is_cuda else 1)
        above, below = (ops.linear_attention(**side, **options) for side in sides)
        return self._divide(above, below, v)

    def _sides(
        self, q: Tensor, k: Tensor, v: Tensor, start: Start, key_start: Start, columns: int = 1
    ) -> list[dict[str, Any]]:
        """The arguments of two calls of linear attention: for the sum above the bar, then below it.

        The values of the sum below are ones, in `columns` columns. Sums are not divided yet, and
        float16 would overflow: tokens in float16 are raised to float32.
        """
        q, k, v = (x.float() if x.dtype == torch.float16 else x for x in (q, k, v))
        ones = v.new_ones(v.shape[2], columns).expand(*v.shape[:2], -1, -1)
        turned_q = rotated_features(q, start, self.base)
        turned_k = rotated_features(k, key_start, self.base)
        return [
            {"q": turned_q, "k": turned_k, "v": v, "feature_map": "identity", "normaliser": "none"},
            {"q": q, "k": k, "v": ones, "feature_map": "1+elu", "normaliser": "none"},
        ]

    def _take(self, side: dict[str, Any], sums: ops.State) -> Tensor:
        """One token of one of the two sums, which changes in place."""
        theta = sums.position.new_zeros(1, 1, dtype=torch.float64)
        by = ops.Recurrence(theta, "plain", side["feature_map"], rule="none")
        return ops.take_step(side["q"], side["k"], side["v"], sums, by)

    def _divide(self, above: Tensor, below: Tensor, v: Tensor) -> Tensor:
        return quotient(above, below[..., :1], "clamp", self.eps).to(v.dtype)
