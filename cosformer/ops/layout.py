"""Where the numbers of a token lie in a row of a layer's projections, and what is made of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.ops.state import State

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
"""The name of a gate -> the function that is applied to the gate's projection."""


class Layout(NamedTuple):
    """Where the numbers of a token lie in a row of its projections; queries come first."""

    heads: int
    key_heads: int
    width: int  # of a head's queries and keys
    value_width: int
    ones: bool  # whether a 1 follows the values of every head
    k: int  # where keys begin
    v: int
    gate: int
    control: int  # where the controls begin: numbers per key head for the mechanism
    columns: int

    @classmethod
    def of(
        cls, heads: int, key_heads: int, width: int, value_width: int, *, gate: bool, controls: int,
        ones: bool,
    ) -> "Layout":  # fmt: skip
        """The layout of a layer with so many controls; rows end at a multiple of 8."""
        k = heads * width
        v = k + key_heads * width
        gates = v + key_heads * (value_width + ones)
        control = gates + gate * heads * value_width
        end = control + controls * key_heads
        return cls(heads, key_heads, width, value_width, ones, k, v, gates, control, end + -end % 8)


class After(NamedTuple):
    """What a layer does to the output of its heads: a norm, then a gate."""

    norm: Tensor | None  # the weight of an RMSNorm per head
    eps: float
    gate: str  # a name of GATES, or "" for none

    def __call__(self, heads: Tensor, rows: Tensor, layout: Layout) -> Tensor:
        """Heads `[.., V]` of all streams as `[B, H·V]`, after norm and gate."""
        if self.norm is not None:
            heads = F.rms_norm(heads.to(self.norm.dtype), self.norm.shape, self.norm, self.eps)
        out = heads.reshape(len(rows), -1)
        if self.gate:
            end = layout.gate + layout.heads * layout.value_width
            out = out * GATES[self.gate](rows[:, layout.gate : end])
        return out


class SumsStep(NamedTuple):
    """What a step of cosFormer and its decaying forms computes, and the state that it changes."""

    layout: Layout
    state: State
    after: After
    theta: Tensor  # [1, 1] or one per key head [H_kv, 1], float64
    decay: Tensor | None  # γ, what is left of the state: [1, H_kv or 1], float64
    log_most: float | None  # log of the largest γ, where a control decides on each token's
    eps: float
