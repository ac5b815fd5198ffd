"""Launches of the sweep kernel.

Few heads leave most of a GPU idle, so a long sequence is then cut into segments: one pass sums the
state of each, a running sum over segments says what each starts with, and all of them go at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.ops.problem import per_head
from cosformer.ops.triton.prepared import NOTHING, ByRow, Prepared, Rows
from cosformer.ops.triton.tiles import FEW_PROGRAMS, choose_tiles, padded, precision, segment_length


class Launch(NamedTuple):
    """One launch; without `x` it only sums states.

    States are `[B, H, segments, R, D, V(+1)]`, one segment standing for all.
    """

    x: Rows | None
    y: Rows
    z: Rows
    causal: bool
    reverse: bool = False
    write: bool = True
    rows: int | None = None  # the length of a segment
    out: Tensor | None = None
    total: Tensor | None = None
    rule: str = "none"
    eps: float = 0.0
    by_row: ByRow | None = None
    scaled: str = ""  # which operand is divided by D
    column_at: str = ""  # who has δ as one more column: the reader or the writer
    gate: Tensor | None = None  # the rows before φ whose gradient the output is
    gated: str = ""  # that φ
    masked: str = ""  # who is masked: the reader or the writer
    dots: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    turned: bool = False  # y has the width of V


class Pass(Prepared):
    """All launches for one call."""

    def launch(self, this: Launch) -> None:
        from cosformer.ops.triton.kernels.sweep import sweep_kernel

        y, z, rule, first, last = this.y, this.z, this.rule, this.first, this.last
        by_row = this.by_row or NOTHING
        column = by_row.column if this.column_at else None
        scale = by_row.scale if this.scaled else None
        read, rows = this.x is not None, this.rows
        reader = y if this.x is None else this.x
        basis = self.query_basis if read != this.reverse else self.key_basis
        length = reader.rows.shape[2]
        contracted, columns = y.rows.shape[3], z.rows.shape[3]
        vectors = rule != "none" or column is not None
        light = not (read and this.write and vectors)
        tiles = choose_tiles(contracted, y.rows.dtype, light=light)
        blocks = -(-columns // tiles.columns)
        if self.bounds is not None:
            segments, rows = self.bounds.shape[0] - 1, 0
        else:
            assert rows is not None
            segments = -(-length // rows)
        programs = self.batch * self.heads * segments * blocks
        if not programs:
            return
        state = last if first is None else first
        state_strides = [0] * 7
        if state is not None:
            _, head, segment, each, key, value = state.stride()
            segment = segment if state.shape[2] > 1 else 0
            cell = (value, key) if this.turned else (key, value)
            state_strides = [head, segment, each, *cell, each, key]
        unused = y.rows  # a pointer that is never followed

        def pointer(tensor: Tensor | None) -> Tensor:
            return unused if tensor is None else tensor

        def vector(state: Tensor | None) -> Tensor:
            return unused if state is None else state[..., -1]

        gates, outs = pointer(this.gate), pointer(this.out)
        table = self.table() if this.column_at == "writer" else by_row.deltas
        written, wide = y, padded(contracted)
        if rule == "none":
            written, wide = z, blocks * tiles.columns
        added = None
        if vectors and this.write and self.decay is None and self.bounds is None:
            weights = column if this.column_at == "writer" else None
            hidden = this.masked == "writer"
            added = self.added(written, basis, weights, tiles.chunk, wide, hidden=hidden)
        tile = self.tile(tiles.chunk, reverse=this.reverse) if this.causal and read else None
        sweep_kernel[(programs,)](
            reader.rows, y.rows, z.rows, gates, outs,
            pointer(this.total), pointer(scale), pointer(column), basis,
            pointer(table), pointer(added), pointer(tile),
            pointer(self.decay), pointer(self.key_mask), pointer(self.bounds),
            pointer(first), vector(first), pointer(last), vector(last), pointer(this.dots),
            self.heads, length, rows, segments, blocks, reader.group, y.group, z.group, this.eps,
            *reader.rows.stride(), *y.rows.stride(), *z.rows.stride(),
            *gates.stride(), *outs.stride(),
            *per_head(basis), *per_head(table), 0 if added is None else added.stride(1),
            *per_head(tile), *per_head(self.decay),
            0 if self.key_mask is None else self.key_mask.stride(0),
            *state_strides,
            K=contracted, N=columns, BLOCK_K=padded(contracted), BLOCK_N=tiles.columns,
            C=tiles.chunk, R=self.states, WIDE=wide,
            CAUSAL=this.causal and read, REVERSE=this.reverse, READ=read, WRITE=this.write,
            RULE="" if rule == "none" else rule,
            COLUMN=this.column_at if column is not None else "",
            SCALED=this.scaled if scale is not None else "",
            X_RELU=reader.relu, Y_RELU=y.relu, Z_RELU=z.relu,
            GATED=this.gated, DECAY=self.decay is not None,
            MASKED=this.masked if self.key_mask is not None else "",
            PACKED=self.bounds is not None, FIRST=first is not None, LAST=last is not None,
            DOTS=this.dots is not None, SUMMED=added is not None, TILED=tile is not None,
            PRECISION=precision(y.rows.dtype),
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def states_of(
        self, segments: int, y: Rows, z: Rows, *, turned: bool, zero: bool = False
    ) -> Tensor:
        """Memory for states `[B, H, segments, R, D, V(+1)]`."""
        key, value = y.rows.shape[3], z.rows.shape[3]
        if turned:
            key, value = value, key
        shape = (self.batch, self.heads, segments, self.states, key, value + self.divides)
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=torch.float32, device=self.device)

    def segment(self, y: Rows, z: Rows, wanted: int = FEW_PROGRAMS) -> int:
        """How many rows of these make a segment."""
        tiles = choose_tiles(y.rows.shape[3], y.rows.dtype)
        programs = self.batch * self.heads * -(-z.rows.shape[3] // tiles.columns)
        return segment_length(programs, y.rows.shape[2], wanted)

    def gather(
        self, this: Launch, start: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, int]:
        """What each segment starts with, the state after the last, and a segment's length.

        One state for all where every row reads all. `this` is a launch that only sums states;
        `start` is `[B, H, 1, R, D, V(+1)]`. Where a causal sequence is one segment there is nothing
        to sum: the last state is then None.
        """
        y, z, turned = this.y, this.z, this.turned
        length = y.rows.shape[2]
        rows = self.segment(y, z)
        packed = self.bounds is not None
        segments = self.bounds.shape[0] - 1 if self.bounds is not None else -(-length // rows)
        if this.causal and (packed or segments <= 1):
            return start, None, rows
        local = self.states_of(segments, y, z, turned=turned)
        self.launch(this._replace(rows=rows, last=local))
        if packed:
            return local, None, rows
        if start is None:
            start = self.states_of(1, y, z, turned=turned, zero=True)
        if not this.causal:
            everything = start + local.sum(2, keepdim=True)
            return everything, everything, rows
        edges = self._running_sum(start, local, rows, length, reverse=this.reverse)
        if this.reverse:
            return edges[:, :, 1:], edges[:, :, :1], rows
        return edges[:, :, :-1], edges[:, :, -1:], rows

    def _running_sum(
        self, start: Tensor, local: Tensor, rows: int, length: int, *, reverse: bool
    ) -> Tensor:
        """The states at the edges of all segments, one more than there are segments."""
        edges = torch.cat([local, start] if reverse else [start, local], 2)
        if self.decay is None:
            return edges.flip(2).cumsum(2).flip(2) if reverse else edges.cumsum(2)
        ends = torch.arange(rows, length + rows, rows, device=self.device).clamp(max=length) - 1
        decay = torch.nn.functional.pad(self.decay[..., ends], (1, 0))  # [b, h, edges]
        gap = decay[..., :, None] - decay[..., None, :]
        later = torch.ones_like(gap, dtype=torch.bool).tril()
        kept = gap.masked_fill(~later, -torch.inf).exp().to(edges.dtype)
        return ((kept.mT if reverse else kept) @ edges.flatten(3)).unflatten(3, edges.shape[3:])
