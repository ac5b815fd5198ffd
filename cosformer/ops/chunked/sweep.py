"""The one computation under forward and backward: a sweep over chunks that carries a state.

For rows x_i, y_j, z_j and weights w(i, j) = exp(L_i − L_j) ψ(i)·ψ(j) a sweep computes

    out_i = Σ_{j ≤ i} w(i, j) (x_i·y_j) z_j          (j ≥ i and w(j, i) when it runs in reverse)

in linear time: pairs within a chunk through a tile of scores, earlier chunks through the state
Σ_j ψ_r(j) y_j z_jᵀ. Attention is sweep(φq, φk, v); its gradients are sweeps of the same rows in
other roles, so this file holds every product that the chunked implementation makes.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.ops.chunked.chunks import Span, fold, repeat_last
from cosformer.ops.chunked.workspace import Into, Scratch

Load = Callable[[Span, Into], Tensor]  # rows of a span, [B, H, n, C, width]
Store = Callable[[Span, Tensor], None]


class Reader(NamedTuple):
    """Rows that read the sums, and where their results go."""

    load: Load
    store: Store


class Window(NamedTuple):
    """The weights of one span. `b`, `h` and `n` are 1 where nothing depends on them."""

    tile: Tensor  # [b, h, n, C, C] w(i, j) within a chunk
    read: Tensor  # [b, h, n, C, R] what a query takes from the state before its chunk
    write: Tensor  # [b, h, n, C, R] what a key leaves in the state after its chunk
    carry: Tensor | None  # [b, h, n + 1, n + 1] how much of an earlier state is left; None = all


class Weight:
    """w(i, j) over one axis of positions, cut into the windows that a sweep needs."""

    def __init__(
        self,
        query_basis: Tensor,  # [b, h, T, R]
        key_basis: Tensor,  # [b, h, T, R]
        decay: Tensor | None,  # L, [b, h, T] float64
        sequence: Tensor | None,  # [T]
    ) -> None:
        self.query_basis = query_basis
        self.key_basis = key_basis
        self.decay = decay
        self.sequence = sequence
        self._tiles: dict[tuple[int, bool], Tensor] = {}

    def window(self, span: Span, *, reverse: bool, strict: bool) -> Window:
        """Forward: queries read, keys write. In reverse they change places and the tile turns."""
        query, key = fold(self.query_basis, span), fold(self.key_basis, span)
        window = Window(self._cosine_tile(query, key, span, strict=strict), query, key, None)
        if self.decay is not None:
            window = _decayed(window, *_fold_and_edge(self.decay, span, 0.0))
        if self.sequence is not None:
            window = _separated(window, *_fold_and_edge(self.sequence[None, None], span, -1))
        if not reverse:
            return window
        tile, read, write, carry = window
        return Window(tile.mT, write, read, None if carry is None else carry.mT)

    def _cosine_tile(self, query: Tensor, key: Tensor, span: Span, *, strict: bool) -> Tensor:
        """ψ(i)·ψ(j) below the diagonal. Only i − j matters, so one chunk's tile serves all."""
        shared = self.sequence is None  # packed sequences start again, each with its own angle
        if shared and (span.chunk_length, strict) in self._tiles:
            return self._tiles[span.chunk_length, strict]
        if shared:
            query, key = query[:, :, :1], key[:, :, :1]
        causal = _causal(span.chunk_length, query.device, strict=strict)
        tile = (query @ key.mT).masked_fill(~causal, 0)
        if shared:
            self._tiles[span.chunk_length, strict] = tile
        return tile


def _decayed(window: Window, total: Tensor, before: Tensor) -> Window:
    """Weights times exp(L_i − L_j): `total` is L `[b, h, n, C]`, `before` L before each chunk."""
    tile, read, write, _ = window
    dtype = tile.dtype
    end = total[..., -1:]
    lower = _causal(total.shape[-1], total.device)
    within = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, 0)
    edges = torch.cat([before[..., :1, 0], end[..., 0]], -1)  # [b, h, n + 1]
    later = _causal(edges.shape[-1], edges.device)
    between = (edges[..., :, None] - edges[..., None, :]).masked_fill(~later, -torch.inf)
    return Window(
        tile * within.exp().to(dtype),
        read * (total - before).exp()[..., None].to(dtype),
        write * (end - total).exp()[..., None].to(dtype),
        between.exp().to(dtype),
    )


def _separated(window: Window, number: Tensor, before: Tensor) -> Window:
    """Weights between packed sequences set to zero: `number` `[1, 1, n, C]` counts them."""
    tile, read, write, carry = window
    end = number[..., -1:]
    edges = torch.cat([before[..., :1, 0], end[..., 0]], -1)
    kept = _causal(edges.shape[-1], edges.device) & (edges[..., :, None] == edges[..., None, :])
    return Window(
        tile.masked_fill(number[..., :, None] != number[..., None, :], 0),
        read.masked_fill((number != before)[..., None], 0),
        write.masked_fill((number != end)[..., None], 0),
        kept.to(tile.dtype) if carry is None else carry * kept,
    )


def sweep(
    y: Load,
    z: Load,
    weight: Weight,
    state: Tensor,
    spans: list[Span],
    *,
    x: Reader,
    mirror: Reader | None = None,
    reverse: bool = False,
    strict: bool = False,
) -> Tensor:
    """Hand each span's rows to the readers and return the state `[B, H, R·y, z]` at the end.

    `x` gets Σ w (x_i·y_j) z_j. `mirror` reads the same sums with y and z in each other's place.
    """
    states = weight.query_basis.shape[-1]
    first = state
    parts = ["x", "y", "z", "scaled", "sums", "scores", "edges"]
    if mirror is not None:
        parts.append("turned")
    with Scratch(state, states, spans, parts) as scratch:
        for span in reversed(spans) if reverse else spans:
            window = weight.window(span, reverse=reverse, strict=strict)
            columns, values = y(span, scratch.rows("y", span)), z(span, scratch.rows("z", span))
            written = _scale(columns, window.write, scratch.rows("scaled", span)).mT
            carry = window.carry
            earlier, state = _accumulate(written, values, state, carry, scratch, reverse=reverse)
            x.store(span, _read(x, span, window, columns, values, earlier, scratch))
            if mirror is not None:
                turned = _turn(earlier, states, scratch)
                mirror.store(span, _read(mirror, span, window, values, columns, turned, scratch))
        return state if state is first else state.clone()


def gather(y: Load, z: Load, write: Tensor, state: Tensor, spans: list[Span]) -> Tensor:
    """The state after all rows, in any order: `state` + Σ_j ψ(j) y_j z_jᵀ."""
    with Scratch(state, write.shape[-1], spans, ("y", "z", "scaled")) as scratch:
        for span in spans:
            columns, values = y(span, scratch.rows("y", span)), z(span, scratch.rows("z", span))
            written = _scale(columns, fold(write, span), scratch.rows("scaled", span)).mT
            state = state + _product(written, values, None).sum(2)
    return state


def scatter(
    x: Reader, read: Tensor, state: Tensor, spans: list[Span], *, turned: bool = False
) -> None:
    """Hand out what every row reads from one and the same state."""
    parts = ("x", "scaled", "sums", "turned") if turned else ("x", "scaled", "sums")
    with Scratch(state, read.shape[-1], spans, parts) as scratch:
        state = state[:, :, None]
        state = _turn(state, read.shape[-1], scratch) if turned else state
        for span in spans:
            rows = x.load(span, scratch.rows("x", span))
            rows = _scale(rows, fold(read, span), scratch.rows("scaled", span))
            sums = scratch.rows("sums", span)(state.shape[-1])
            same = state.expand(-1, -1, span.chunks, -1, -1)
            x.store(span, _product(rows, same, sums))


def _read(
    reader: Reader,
    span: Span,
    window: Window,
    columns: Tensor,
    values: Tensor,
    earlier: Tensor,
    scratch: Scratch,
) -> Tensor:
    """The rows' sums over their own chunk, by a tile of scores, and over earlier ones."""
    rows = reader.load(span, scratch.rows("x", span))
    scores = scratch.rows("scores", span)(span.chunk_length)
    scores = _product(rows, columns.mT, scores).mul_(window.tile)
    near = _product(scores, values, scratch.rows("sums", span)(values.shape[-1]))
    scaled = _scale(rows, window.read, scratch.rows("scaled", span))
    return _add_product(near, scaled, earlier)


def _product(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """a @ b of `[B, H, n, …]`, in `out` if there is one."""
    if out is None:
        return a @ b
    left, right, into = map(_in_order_of_memory, (a, b, out))
    torch.bmm(left, right, out=into)
    return out


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sums + a @ b of `[B, H, n, …]`, in `sums` except under torch.compile and torch.export."""
    if torch.compiler.is_compiling():
        return sums + a @ b
    into, left, right = map(_in_order_of_memory, (sums, a, b))
    torch.baddbmm(into, left, right, out=into)
    return sums


def _in_order_of_memory(x: Tensor) -> Tensor:
    """`[B, H, n, C, d]` as the batch `[n·B·H, C, d]` that it lies in: nothing is copied."""
    return x.permute(2, 0, 1, 3, 4).flatten(0, 2)


def _turn(state: Tensor, states: int, scratch: Scratch) -> Tensor:
    """`[B, H, n, R·y, z]` as `[B, H, n, R·z, y]`."""
    turned = state.unflatten(3, (states, -1)).mT
    into = scratch.take("turned", state.shape[2], states * turned.shape[4], turned.shape[5])
    if into is None:
        return turned.flatten(3, 4)
    into.unflatten(3, (states, -1)).copy_(turned)
    return into


def _fold_and_edge(values: Tensor, span: Span, first: float) -> tuple[Tensor, Tensor]:
    """Values `[b, h, T]` as `[b, h, n, C]`, and the one before each chunk as `[b, h, n, 1]`."""
    if span.start:
        before_span = values[..., span.start - 1 : span.start]
    else:
        before_span = torch.full_like(values[..., :1], first)
    values = values[..., span.rows]
    if span.padded:
        chunks = repeat_last(values, span)
    else:
        chunks = values.unflatten(2, (-1, span.chunk_length))
    return chunks, torch.cat([before_span, chunks[..., :-1, -1]], -1)[..., None]


def _causal(length: int, device: torch.device, *, strict: bool = False) -> Tensor:
    index = torch.arange(length, device=device)
    return index[:, None] > index if strict else index[:, None] >= index


def _scale(rows: Tensor, basis: Tensor, into: Into) -> Tensor:
    """Rows `[…, C, d]` times each of the R basis functions: `[…, C, R·d]`."""
    scaled = into(basis.shape[-1] * rows.shape[-1])
    if scaled is None:
        return (rows[..., None, :] * basis[..., :, None]).flatten(-2)
    parts = scaled.unflatten(-1, (basis.shape[-1], -1))
    for r in range(basis.shape[-1]):  # a third faster than one product that broadcasts twice
        torch.mul(rows, basis[..., r, None], out=parts[..., r, :])
    return scaled


def _accumulate(
    written: Tensor,
    values: Tensor,
    state: Tensor,
    carry: Tensor | None,
    scratch: Scratch,
    *,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The state before each chunk `[B, H, n, R·y, z]`, and the one after the last."""
    chunks = written.shape[2]
    # Edges run one more than chunks: an update belongs to the edge after its chunk.
    edges = scratch.take("edges", chunks + 1, *state.shape[2:])
    if edges is not None:
        slots = edges.unbind(2)[:: -1 if reverse else 1]
        slots[0].copy_(state)
        _product(written, values, edges[:, :, :-1] if reverse else edges[:, :, 1:])
        for i, (before, after) in enumerate(pairwise(slots)):
            if carry is None:
                after.add_(before)
            else:
                kept = carry[:, :, -2 - i, -1 - i] if reverse else carry[:, :, i + 1, i]
                after.addcmul_(before, kept[..., None, None])
    else:
        update = _product(written, values, None)
        first, last = (update, state[:, :, None]) if reverse else (state[:, :, None], update)
        edges = torch.cat([first, last], 2)  # [B, H, n + 1, R·y, z]
        if carry is not None:
            edges = (carry @ edges.flatten(3)).unflatten(3, edges.shape[3:])
        elif reverse:
            edges = edges.flip(2).cumsum(2).flip(2)
        else:
            edges = edges.cumsum(2)
    if reverse:
        return edges[:, :, 1:], edges[:, :, 0]
    return edges[:, :, :-1], edges[:, :, -1]
