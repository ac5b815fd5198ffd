"""Rotary positions ("RoFormer", Su et al., 2021), and linear attention under them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.mechanisms.base import Mechanism, Request
from cosformer.mechanisms.family import LinearMechanism, in_full, positions
from cosformer.mechanisms.traits import Cost
from cosformer.ops import State, linear_attention, linear_attention_with_state
from cosformer.ops.check import check_positive


def rotate(x: Tensor, position: Tensor, base: float = 1e4) -> Tensor:
    """Each pair (x_2n, x_2n+1) turned by position · base^(−2n/width); x `[B, H, T, D]`.

    Args:
        position: `[b, T]`, b is 1 or B.
    """
    pairs = torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device)
    angle = position.double()[:, None, :, None] * base ** (-pairs / x.shape[-1])  # [b, 1, T, D/2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    turn = _turn_traced if torch.compiler.is_compiling() else _turn
    return turn(x.to(dtype), cos, sin).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs as complex numbers, which must begin at even places in memory: one product each."""
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % 2 else x
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def _turn_traced(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same by real numbers, four times as slow by itself: compilers know no complex ones."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


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
        "out_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j), φ = 1 + elu, "
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
        return TwoSums(above, below)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, TwoSums]:
        if not isinstance(state, TwoSums):
            raise TypeError(f"state must be TwoSums, got {type(state).__name__}")
        states: list[State] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, after = linear_attention_with_state(
                q, k, v, state=state[len(states)], normaliser="none", key_mask=request.key_mask
            )
            states.append(after)
            return out

        start = state.above.position
        return self._quotient(q, k, v, start, start, attend), TwoSums(*states)

    def state_size(self, length: int) -> int:
        return self.key_heads * self.width * (self.width + 1)

    def cost(self, length: int) -> Cost:
        tokens = (self.heads + self.key_heads) * length * self.width
        operations = 4 * self.heads * length * self.width * (self.width + 1) + 5 * tokens
        return Cost(operations, 4 * 4 * tokens)  # inputs and output, features, rotated features

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return linear_attention(
                q,
                k,
                v,
                causal=request.causal,
                normaliser="none",
                key_mask=request.key_mask,
                query_start=request.start,
                impl=impl,
            )

        return self._quotient(q, k, v, request.start, 0, attend)

    def _quotient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start: int | Tensor,
        key_start: int | Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        q, k = in_full(_one_plus_elu, q), in_full(_one_plus_elu, k)
        turned_q = rotate(q, positions(query_start, q.shape[2], q), self.base)
        turned_k = rotate(k, positions(key_start, k.shape[2], k), self.base)
        above = attend(turned_q, turned_k, v)
        below = attend(q, k, torch.ones_like(k[..., :1])).clamp(min=self.eps)
        return above * below.reciprocal()  # a quotient's gradient makes three more tensors


def _one_plus_elu(x: Tensor) -> Tensor:
    return F.elu(x).add_(1)
