"""One token of streams in memory of a fixed size, from a layer's projections to its heads.

Everything between two matrix products of a layer is one call here: the features, the state, the
norm of heads and their gate.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.ops.layout import After, Layout, SumsStep
from cosformer.ops.problem import basis, least_gate
from cosformer.ops.state import State
from cosformer.ops.step import Recurrence
from cosformer.ops.triton import sums_token, token_serves
from cosformer.runtime import on_gpu

FEW = 8
"""Angles up to which a CPU is faster by Python's own sines than by calls of torch."""


class Clock:
    """Values that all layers share in one step, such as sines; the first layer makes them."""

    def __init__(self, position: Tensor, length: Tensor) -> None:
        self.position = position  # [B] int64: real tokens so far
        self.length = length  # [B] int64: tokens so far, padding included
        self._made: dict[Any, Any] = {}

    def tick(self) -> None:
        """Begin the next step: discard the values of the last one."""
        self._made.clear()

    def recall(self, name: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for a token."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def laid_out(state: State) -> State:
    """An empty state with its sums laid out in memory as a step reads them.

    On a CPU they share one memory `[B, H, R, D, V + 1]`, which one call updates. Kernels want rows
    that begin at even addresses: both sums have a memory of their own.
    """
    if on_gpu(state.key_value):
        return state._replace(
            key_value=state.key_value.contiguous(), key_sum=state.key_sum.contiguous()
        )
    *shape, width = state.key_value.shape
    joined = state.key_value.new_zeros(*shape, width + 1)
    return state._replace(key_value=joined[..., :-1], key_sum=joined[..., -1])


class SumsToken:
    """The step of cosFormer and its decaying forms: rows of projections `[B, columns]` to heads."""

    def __init__(
        self,
        layout: Layout,
        state: State,
        by: Recurrence,
        after: After,
        clock: Clock,
        log_most: float | None = None,
    ) -> None:
        """log_most: the logarithm of the largest decay, where a control decides on each token's."""
        decay = None if by.decay is None else by.decay.contiguous()
        theta = by.theta.contiguous()
        self.given = SumsStep(layout, state, after, theta, decay, log_most, by.eps)
        self.layout, self.state, self.after, self.by = layout, state, after, by
        self.clock, self.log_most = clock, log_most
        self.kernel = on_gpu(state.key_value)
        if not self.kernel:
            self._prepare()

    @staticmethod
    def serves(state: State, by: Recurrence) -> bool:
        """Whether such a stream can be stepped here."""
        if not by.is_cosformer or by.weight == "raised_cosine":
            return False
        if on_gpu(state.key_value):
            return token_serves(state)
        return state.key_value.stride(3) == state.key_value.shape[4] + 1  # as `laid_out` makes it

    def __call__(self, rows: Tensor) -> Tensor:
        if self.kernel:
            return sums_token(rows, self.given, self.clock.length)
        layout, joined = self.layout, self._joined
        batch, heads, width = len(rows), layout.key_heads, joined.shape[1]
        numbers = rows if rows.dtype == joined.dtype else rows.to(joined.dtype)
        features = numbers[:, : layout.v].relu().view(batch, -1, 1, layout.width)
        if self.by.weight != "plain":
            features = features * self.clock.recall(self._turn, self._basis)  # [B, H + H_kv, R, D]
        read = features[:, : layout.heads].reshape(batch * heads, -1, width)
        keys = features[:, layout.heads :].reshape(batch * heads, width, 1)
        values = numbers[:, layout.v : layout.gate].reshape(batch * heads, 1, -1)
        if self.log_most is not None:
            self._fade(numbers, self.log_most)
        elif self._left is not None:
            joined.mul_(self._left)
        joined.baddbmm_(keys, values)
        out = read.bmm(joined)  # [B·H_kv, groups, V + 1]
        above, below = out.split_with_sizes(self._columns, -1)
        made = above / below.clamp_(min=self.by.eps)
        return self.after(made, rows, layout).to(rows.dtype)

    def _prepare(self) -> None:
        sums, by = self.state.key_value, self.by
        shape, strides = (*sums.shape[:4], sums.shape[4] + 1), sums.stride()
        self._joined = sums.as_strided(shape, strides).flatten(2, 3).flatten(0, 1)
        self._columns = [sums.shape[4], 1]
        self._turn = by.weight, *by.theta.flatten().tolist()
        self._left = None
        if by.decay is not None:
            left = by.decay.to(sums.dtype).expand(sums.shape[:2])
            self._left = left.reshape(-1, 1, 1)

    def _basis(self) -> Tensor:
        """cos and sin of each stream's angle, `[B, 1 or H + H_kv, R, 1]`."""
        layout, length, (_, *theta) = self.layout, self.clock.length, self._turn
        if len(length) * len(theta) <= FEW:
            angles = [turn * here for here in length.tolist() for turn in theta]
            waves = [wave(angle) for angle in angles for wave in (math.cos, math.sin)]
            psi = torch.tensor(waves, dtype=self._joined.dtype).view(len(length), -1, 2, 1)
        else:
            turns = length.to(torch.float64).reshape(-1, 1), self.by.theta, self.by.weight
            psi = basis(*turns, self._joined.dtype).mT  # [b, h, R, 1]
        if psi.shape[1] == 1:
            return psi
        groups = layout.heads // layout.key_heads
        return torch.cat([psi.repeat_interleave(groups, 1), psi], 1)

    def _fade(self, numbers: Tensor, log_most: float) -> None:
        """Shrink all sums by the decay of the token."""
        at = self.layout.control
        log = F.logsigmoid(numbers[:, at : at + self.layout.key_heads]) + log_most
        assert isinstance(self.state.log_decay, Tensor)
        self.state.log_decay.add_(log.clamp(min=least_gate(log.dtype)))
        self._joined.mul_(log.exp().view(-1, 1, 1))
