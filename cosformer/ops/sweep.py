"""The one computation under forward and backward: a sweep over chunks that carries a state.

For rows x_i, y_j, z_j and weights w(i, j) = exp(L_i − L_j) ψ(i)·ψ(j) a sweep computes

    out_i = Σ_{j ≤ i} w(i, j) (x_i·y_j) z_j          (j ≥ i and w(j, i) when it runs in reverse)

in linear time: pairs within a chunk through a tile of scores, earlier chunks through the state
Σ_j ψ_r(j) y_j z_jᵀ. Attention is sweep(φq, φk, v); its gradients are sweeps of the same rows in
other roles, so this file holds every product that the chunked implementation makes.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_LENGTH = 64  # a longer chunk means larger products, but more of them above the diagonal
CPU_CHUNKS = 64  # chunks × heads in flight: few enough for the cache, so many that Python is idle
FEW_CHUNKS = 16  # up to here states are summed one by one
GPU_CHUNKS = 2048  # enough to fill the chip; the states in flight stay below a gigabyte

Into = Callable[[int], Tensor | None]  # a width -> memory for a span's rows of it, or None
Load = Callable[["Span", Into], Tensor]  # rows of a span, [B, H, n, C, width]
Store = Callable[["Span", Tensor], None]


class Reader(NamedTuple):
    """Rows that read the sums, and where their results go."""

    load: Load
    store: Store


class Span(NamedTuple):
    """A stretch of `chunks` chunks that is computed at once."""

    start: int
    stop: int
    chunks: int
    chunk_length: int
    padded: bool = False  # the last chunks reach past `stop`

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def plan(length: int, heads: int, device: str) -> list[Span]:
    """How a sequence is cut.

    Under a tracer one span takes all, so that the length may be symbolic. An exported graph gets
    three chunks at the least: no size in it, nor one less, may be 1 where it is symbolic.
    """
    if isinstance(length, int) and length == 0:
        return []
    if torch.compiler.is_exporting():
        return [Span(0, length, length // CHUNK_LENGTH + 3, CHUNK_LENGTH, padded=True)]
    if torch.compiler.is_compiling():
        chunks = (length + CHUNK_LENGTH - 1) // CHUNK_LENGTH
        return [Span(0, length, chunks, CHUNK_LENGTH, padded=chunks * CHUNK_LENGTH != length)]
    wanted = CPU_CHUNKS if device == "cpu" else GPU_CHUNKS
    group = max(1, wanted // max(1, heads)) * CHUNK_LENGTH
    whole = length - length % CHUNK_LENGTH
    spans = []
    for start in range(0, whole, group):
        stop = min(start + group, whole)
        spans.append(Span(start, stop, (stop - start) // CHUNK_LENGTH, CHUNK_LENGTH))
    if whole < length:
        spans.append(Span(whole, length, 1, length - whole))
    return spans


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


class Scratch:
    """The memory that the spans of a sweep share, in one piece.

    Fresh pages cost as much as the work on them; a single large piece is one that libc keeps for
    the next call. It is laid out chunk by chunk, all heads of a chunk together, as products read.
    """

    def __init__(
        self, state: Tensor, states: int, spans: list[Span], *, mirror: bool = False
    ) -> None:
        self._heads = state.shape[:2]
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, int, int], Tensor] = {}
        if torch.compiler.is_compiling() or not spans:
            return
        wide, y, z = max(state.shape[2] // states, state.shape[3]), *state.shape[2:]
        chunks = max(span.chunks for span in spans)
        length = max(span.chunk_length for span in spans)
        widths = {"x": wide, "y": y // states, "z": z, "scaled": states * wide, "sums": wide}
        sizes = {name: chunks * length * width for name, width in widths.items()}
        sizes["scores"] = chunks * length * length
        if chunks <= FEW_CHUNKS:
            sizes["edges"] = (chunks + 1) * y * z
        if mirror:
            sizes["turned"] = chunks * y * z
        aligned = [-(-size * self._heads.numel() // 16) * 16 for size in sizes.values()]
        parts = state.new_empty(sum(aligned)).split(aligned)
        self._memory = dict(zip(sizes, parts, strict=True))

    def take(self, name: str, chunks: int, rows: int, width: int) -> Tensor | None:
        """`[B, H, n, rows, width]`, with what the last user of that name left in it.

        None where it has no part, and under a tracer, whose graph must not write into memory.
        """
        if name not in self._memory:
            return None
        key = (name, chunks, rows, width)
        if key not in self._views:  # most spans ask for the same
            shape = (chunks, *self._heads, rows, width)
            part = self._memory[name][: math.prod(shape)]
            self._views[key] = part.view(shape).permute(1, 2, 0, 3, 4)
        return self._views[key]

    def rows(self, name: str, span: Span) -> Into:
        return lambda width: self.take(name, span.chunks, span.chunk_length, width)


def nowhere(width: int) -> Tensor | None:
    """Rows that shall have memory of their own."""
    return None


def placed(rows: Tensor, into: Into, *, column: Tensor | None = None) -> Tensor:
    """Rows, and a column after them, in the memory that `into` has."""
    if column is None:
        buffer = into(rows.shape[-1])
        return rows if buffer is None else buffer.copy_(rows)
    buffer = into(rows.shape[-1] + 1)
    if buffer is None:
        return torch.cat([rows, column], -1)
    buffer[..., :-1] = rows
    buffer[..., -1:] = column
    return buffer


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
    scratch = Scratch(state, states, spans, mirror=mirror is not None)
    first = state
    for span in reversed(spans) if reverse else spans:
        window = weight.window(span, reverse=reverse, strict=strict)
        columns, values = y(span, scratch.rows("y", span)), z(span, scratch.rows("z", span))
        written = _scale(columns, window.write, scratch.rows("scaled", span)).mT
        earlier, state = _accumulate(written, values, state, window.carry, scratch, reverse=reverse)
        x.store(span, _read(x, span, window, columns, values, earlier, scratch))
        if mirror is not None:
            turned = _turn(earlier, states, scratch)
            mirror.store(span, _read(mirror, span, window, values, columns, turned, scratch))
    return state if state is first else state.clone()


def gather(y: Load, z: Load, write: Tensor, state: Tensor, spans: list[Span]) -> Tensor:
    """The state after all rows, in any order: `state` + Σ_j ψ(j) y_j z_jᵀ."""
    scratch = Scratch(state, write.shape[-1], spans)
    for span in spans:
        columns, values = y(span, scratch.rows("y", span)), z(span, scratch.rows("z", span))
        written = _scale(columns, fold(write, span), scratch.rows("scaled", span)).mT
        state = state + _product(written, values, None).sum(2)
    return state


def scatter(
    x: Reader, read: Tensor, state: Tensor, spans: list[Span], *, turned: bool = False
) -> None:
    """Hand out what every row reads from one and the same state."""
    scratch = Scratch(state, read.shape[-1], spans, mirror=turned)
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
    return _product(scaled, earlier, near, add=True)


def _product(a: Tensor, b: Tensor, out: Tensor | None, *, add: bool = False) -> Tensor:
    """a @ b, or out + a @ b, of `[B, H, n, …]`; in `out` except under a tracer."""
    if out is None:
        return a @ b
    if torch.compiler.is_compiling():
        return out + a @ b
    # In the order of memory, so that nothing is copied.
    left, right, into = (x.permute(2, 0, 1, 3, 4).flatten(0, 2) for x in (a, b, out))
    if add:
        torch.baddbmm(into, left, right, out=into)
    else:
        torch.bmm(left, right, out=into)
    return out


def _turn(state: Tensor, states: int, scratch: Scratch) -> Tensor:
    """`[B, H, n, R·y, z]` as `[B, H, n, R·z, y]`."""
    turned = state.unflatten(3, (states, -1)).mT
    into = scratch.take("turned", state.shape[2], states * turned.shape[4], turned.shape[5])
    if into is None:
        return turned.flatten(3, 4)
    into.unflatten(3, (states, -1)).copy_(turned)
    return into


def fold(rows: Tensor, span: Span) -> Tensor:
    """The span's rows of `[B, H, T, d]` as `[B, H, n, C, d]`; padding is zeros."""
    if span.padded:
        index = _padded_index(span, rows.device)
        beyond = index >= span.stop - span.start
        return _repeat_last(rows[:, :, span.rows], span).masked_fill(beyond[..., None], 0)
    batch, heads, _, width = rows.shape
    part = rows.narrow(2, span.start, span.stop - span.start)
    return part.view(batch, heads, span.chunks, span.chunk_length, width)


def put(into: Tensor, span: Span, rows: Tensor) -> None:
    """The inverse of `fold`: rows `[B, H, n, C, d]` to their places in `[B, H, T, d]`."""
    if span.padded:
        index = torch.arange(span.stop - span.start, device=rows.device)
        into[:, :, span.rows] = rows.flatten(2, 3)[:, :, index]
    else:
        fold(into, span).copy_(rows)


def _fold_and_edge(values: Tensor, span: Span, first: float) -> tuple[Tensor, Tensor]:
    """Values `[b, h, T]` as `[b, h, n, C]`, and the one before each chunk as `[b, h, n, 1]`."""
    if span.start:
        before_span = values[..., span.start - 1 : span.start]
    else:
        before_span = torch.full_like(values[..., :1], first)
    values = values[..., span.rows]
    if span.padded:
        chunks = _repeat_last(values, span)
    else:
        chunks = values.unflatten(2, (-1, span.chunk_length))
    return chunks, torch.cat([before_span, chunks[..., :-1, -1]], -1)[..., None]


def _repeat_last(rows: Tensor, span: Span) -> Tensor:
    """The span's rows in chunks, the last row repeated.

    By index: of all ways to pad, the one that puts no condition on a symbolic length.
    """
    index = _padded_index(span, rows.device)
    return rows[:, :, index.clamp(max=span.stop - span.start - 1)]


def _padded_index(span: Span, device: torch.device) -> Tensor:
    chunk = torch.arange(span.chunks, device=device)[:, None]
    return chunk * span.chunk_length + torch.arange(span.chunk_length, device=device)  # [n, C]


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
