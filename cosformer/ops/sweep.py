"""The one computation under forward and backward: a sweep over chunks that carries a state.

For rows x_i, y_j, z_j and weights w(i, j) = exp(L_i − L_j) ψ(i)·ψ(j) a sweep computes

    out_i = Σ_{j ≤ i} w(i, j) (x_i·y_j) z_j          (j ≥ i and w(j, i) when it runs in reverse)

in linear time: pairs within a chunk through a tile of scores, earlier chunks through the state
Σ_j ψ_r(j) y_j z_jᵀ. Attention is sweep(φq, φk, v); its gradients are sweeps of the same rows in
other roles, so this file holds every product that the chunked implementation makes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_LENGTH = 64  # a longer chunk means larger products, but more of them above the diagonal
CPU_CHUNKS = 64  # chunks × heads in flight: few enough for the cache, so many that Python is idle
FEW_CHUNKS = 16  # up to here states are summed one by one
GPU_CHUNKS = 2048  # enough to fill the chip; the states in flight stay below a gigabyte

Load = Callable[["Span"], Tensor]  # rows of a span, [B, H, length, width]
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
    for span in reversed(spans) if reverse else spans:
        window = weight.window(span, reverse=reverse, strict=strict)
        columns, values = fold(y(span), span), fold(z(span), span)
        written = _scale(columns, window.write).mT
        earlier, state = _accumulate(written, values, state, window.carry, reverse=reverse)
        x.store(span, _read(x.load(span), span, window, columns, values, earlier))
        if mirror is not None:
            turned = _turn(earlier, window.read.shape[-1])
            mirror.store(span, _read(mirror.load(span), span, window, values, columns, turned))
    return state


def gather(y: Load, z: Load, write: Tensor, state: Tensor, spans: list[Span]) -> Tensor:
    """The state after all rows, in any order: `state` + Σ_j ψ(j) y_j z_jᵀ."""
    for span in spans:
        columns = _scale(fold(y(span), span), fold(write, span))
        state = state + (columns.mT @ fold(z(span), span)).sum(2)
    return state


def scatter(
    x: Reader, read: Tensor, state: Tensor, spans: list[Span], *, turned: bool = False
) -> None:
    """Hand out what every row reads from one and the same state."""
    state = _turn(state, read.shape[-1]) if turned else state
    for span in spans:
        rows = _scale(fold(x.load(span), span), fold(read, span))
        x.store(span, unfold(rows @ state[:, :, None], span))


def _read(
    rows: Tensor, span: Span, window: Window, columns: Tensor, values: Tensor, earlier: Tensor
) -> Tensor:
    """The rows' sums over their own chunk, by a tile of scores, and over earlier ones."""
    rows = fold(rows, span)
    scores = _product(rows, columns.mT).mul_(window.tile)
    near = _product(scores, values)
    return unfold(_product(_scale(rows, window.read), earlier, near), span)


def _product(a: Tensor, b: Tensor, add: Tensor | None = None) -> Tensor:
    """a @ b (+ add) over all leading dimensions, without the cost of a general matmul."""
    if torch.compiler.is_compiling():  # a symbolic batch is not to be reshaped
        return a @ b if add is None else add + a @ b
    shape = (*a.shape[:-1], b.shape[-1])
    a, b = a.flatten(0, -3), b.flatten(0, -3)
    if add is None:
        return torch.bmm(a, b).view(shape)
    return torch.baddbmm(add.flatten(0, -3), a, b).view(shape)


def _turn(state: Tensor, states: int) -> Tensor:
    """`[…, R·y, z]` as `[…, R·z, y]`."""
    return state.unflatten(-2, (states, -1)).mT.flatten(-3, -2)


def fold(rows: Tensor, span: Span) -> Tensor:
    """`[B, H, T, d]`, all rows or the span's, as `[B, H, n, C, d]`; padding is zeros."""
    if rows.shape[2] != span.stop - span.start:
        rows = rows[:, :, span.rows]
    if not span.padded:
        return rows.reshape(*rows.shape[:2], span.chunks, span.chunk_length, rows.shape[3])
    index = _padded_index(span, rows.device)
    beyond = index >= span.stop - span.start
    return _repeat_last(rows, span).masked_fill(beyond[..., None], 0)


def unfold(rows: Tensor, span: Span) -> Tensor:
    """The inverse of `fold`."""
    rows = rows.flatten(2, 3)
    if span.padded:
        rows = rows[:, :, torch.arange(span.stop - span.start, device=rows.device)]
    return rows


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


def _scale(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows `[…, C, d]` times each of the R basis functions: `[…, C, R·d]`."""
    if torch.compiler.is_compiling():
        return (rows[..., None, :] * basis[..., :, None]).flatten(-2)
    scaled = rows.new_empty(*rows.shape[:-1], basis.shape[-1], rows.shape[-1])
    for r in range(basis.shape[-1]):  # a third faster than one product that broadcasts twice
        torch.mul(rows, basis[..., r, None], out=scaled[..., r, :])
    return scaled.flatten(-2)


def _accumulate(
    written: Tensor, values: Tensor, state: Tensor, carry: Tensor | None, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The state before each chunk `[B, H, n, R·y, z]`, and the one after the last."""
    chunks = written.shape[2]
    if not torch.compiler.is_compiling() and chunks <= FEW_CHUNKS:
        batch = state.shape[:2]
        earlier = state.new_empty(*batch, chunks, *state.shape[2:])
        # Heads as one dimension: a loop over chunks should do nothing but its products.
        a, b, total, into = (x.flatten(0, 1) for x in (written, values, state, earlier))
        for i in reversed(range(chunks)) if reverse else range(chunks):
            into[:, i] = total
            if carry is not None:
                kept = carry[:, :, i, i + 1] if reverse else carry[:, :, i + 1, i]
                total = total * kept.expand(batch).reshape(-1, 1, 1)
            total = torch.baddbmm(total, a[:, i], b[:, i])
        return earlier, total.view(state.shape)
    # Edges run one more than chunks: an update belongs to the edge after its chunk.
    update = _product(written, values)
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
