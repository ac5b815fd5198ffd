"""Softmax of one token of many streams, from a layer's projections to its heads."""

import torch
from torch import Tensor

from cosformer.mechanisms.cache import HeldCache
from cosformer.mechanisms.sdpa import sdpa
from cosformer.ops import After, Clock, Layout, early_launch
from cosformer.runtime import HAS_TRITON, on_gpu

PROGRAMS = 528
"""Programs among which the keys of all streams are shared out: four for each of an H200's
multiprocessors."""
STRETCHES = (64, 1024)
"""The fewest and the most keys of a program."""
PARTS = 256
"""The most stretches of a stream, which one program joins."""
KEYS = 64
"""Keys that a program looks at together."""


class SoftmaxToken:
    """The step of softmax with a cache: rows of projections `[B, columns]` to heads."""

    def __init__(
        self, layout: Layout, state: HeldCache, after: After, clock: Clock, base: float | None
    ) -> None:
        """base: of rotary positions; None: queries and keys are not turned."""
        self.layout, self.state, self.after, self.clock = layout, state, after, clock
        self.base, self.kernels = base, on_gpu(state.k)
        pairs = torch.arange(0, layout.width, 2, dtype=torch.float64, device=state.k.device)
        self.turns = (base or 1.0) ** (-pairs / layout.width)  # angles between neighbours
        self.scale = layout.width**-0.5

    @staticmethod
    def serves(state: HeldCache, base: float | None) -> bool:
        """Whether such a stream can be stepped here."""
        width = state.k.shape[3]
        if not on_gpu(state.k):
            return True
        whole = base is None or width & (width - 1) == 0  # pairs of a power of two
        return HAS_TRITON and whole and state.k.dtype != torch.float64 and width <= 256

    def __call__(self, rows: Tensor) -> Tensor:
        return self._by_kernels(rows) if self.kernels else self._by_torch(rows)

    def _by_torch(self, rows: Tensor) -> Tensor:
        layout, state, clock = self.layout, self.state, self.clock
        both = rows[:, : layout.v].view(len(rows), -1, 1, layout.width)
        if self.base is not None:
            turn = clock.recall(("turn", self.base, layout.width), self._turn)
            pairs = torch.view_as_complex(both.to(turn.real.dtype).unflatten(-1, (-1, 2)))
            both = torch.view_as_real(pairs * turn).flatten(-2).to(rows.dtype)
        q, k = both[:, : layout.heads], both[:, layout.heads :]
        v = rows[:, layout.v : layout.gate].view(len(rows), -1, 1, layout.value_width)
        first, last, seen = clock.recall("seen", self._seen)
        if first == last:
            state.k[:, :, last : last + 1].copy_(k)
            state.v[:, :, last : last + 1].copy_(v)
        else:
            state.write(k, v)
        out = sdpa(q, state.k[:, :, : last + 1], state.v[:, :, : last + 1], attn_mask=seen)
        return self.after(out, rows, layout).to(rows.dtype)

    def _turn(self) -> Tensor:
        """e^(i·angle) of each stream and pair, `[B, 1, 1, D/2]`."""
        angle = self.clock.length[:, None] * self.turns
        turn = torch.polar(torch.ones_like(angle), angle)[:, None, None]
        return turn if self.state.k.dtype == torch.float64 else turn.to(torch.complex64)

    def _seen(self) -> tuple[int, int, Tensor | None]:
        """The fewest and the most tokens before this one, and the mask where they differ."""
        position = self.clock.position
        first, last = (int(x) for x in torch.aminmax(position))
        if first == last:
            return first, last, None
        index = torch.arange(last + 1, device=position.device)
        return first, last, (index <= position[:, None])[:, None, None]

    def _by_kernels(self, rows: Tensor) -> Tensor:
        from cosformer.mechanisms.dense.softmax_kernels import (
            join_kernel,
            part_kernel,
            write_kernel,
        )

        layout, (k, v, position, _) = self.layout, self.state
        batch, heads, width, value_width = len(rows), layout.heads, k.shape[3], v.shape[3]
        tiles = {"K": width, "V": value_width}
        tiles |= {"BLOCK_K": _padded(width), "BLOCK_V": _padded(value_width)}
        queries = rows.new_empty(batch * heads, width)
        strides, early = (*k.stride()[:3], *v.stride()[:3]), early_launch(rows)
        write_kernel[(batch * (heads + layout.key_heads),)](
            rows, queries, k, v, position, self.clock.length,
            self.turns,
            k.shape[2], heads, layout.key_heads, rows.stride(0), layout.k, layout.v, *strides,
            **tiles, ROTARY=self.base is not None, num_warps=1, **early,
        )  # fmt: skip
        stretch = stretch_of(k.shape[2], batch * heads)
        splits = -(-k.shape[2] // stretch)
        shape = (batch * heads, splits)
        parts = rows.new_empty(*shape, value_width, dtype=torch.float32)
        sums, tops = (rows.new_empty(shape, dtype=torch.float32) for _ in range(2))
        part_kernel[shape](
            queries, k, v, position, parts, sums, tops, self.scale, heads,
            heads // layout.key_heads, stretch, splits, *strides, **tiles, BLOCK_S=KEYS,
            num_warps=4, **early,
        )  # fmt: skip
        out = rows.new_empty(batch, heads * value_width)
        norm = rows if self.after.norm is None else self.after.norm
        join_kernel[(batch * heads,)](
            parts, sums, tops, rows, norm, out, self.after.eps, splits, heads, rows.stride(0),
            layout.gate, V=value_width, BLOCK_V=tiles["BLOCK_V"], SPLITS=_padded(splits, 1),
            NORM=self.after.norm is not None, GATE=self.after.gate, num_warps=4,
            **early,
        )  # fmt: skip
        return out


def stretch_of(length: int, programs: int) -> int:
    """Keys of a stretch: few enough to occupy a GPU where there are few streams and heads."""
    least, most = STRETCHES
    fair = min(most, -(-length * programs // PROGRAMS))
    return _padded(max(fair, -(-length // PARTS)), least)


def _padded(size: int, least: int = 16) -> int:
    return max(least, 1 << (size - 1).bit_length())
