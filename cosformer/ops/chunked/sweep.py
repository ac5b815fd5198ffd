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

from cosformer.ops.chunked.chunks import (
    Plan,
    Reading,
    Span,
    Spans,
    Workspace,
    cut,
    repeat_last,
)
from cosformer.runtime import under_mode

Load = Callable[[int, Tensor | None], Tensor]
"""(the number of a span, memory for its rows or None) -> the rows `[B, H, n, C, width]`."""
Store = Callable[[int, Tensor, Tensor | None], None]
"""(the number of a span, sums `[B, H, n, C, width]`, their factors `[b, h, n, C, 1]` or None)"""

SWEEP = ("x", "y", "z", "scaled", "sums", "scores", "edges")
MIRRORED = (*SWEEP, "turned")
GATHER = ("y", "z", "scaled")
SCATTER = ("x", "scaled", "sums")
MILD = 45.0  # a chunk that loses less than e⁴⁵ has its decays in factors of rows, below e²³


class Reader(NamedTuple):
    """Rows that read the sums, and where their results go."""

    load: Load
    store: Store
    store_signed: Callable[[int, Tensor, Tensor], None] | None = None
    """In place of `store` where a row meets rows on both sides: (the number of a span, sums, those
    over the pairs that a causal sweep has less those over the others)."""


class Pattern(NamedTuple):
    """w(i, j), and which pairs meet: j ≤ i when causal, else all (of one packed sequence).

    Of a pair j > i the weight is w(j, i): a decay counts the tokens in between, in either order.
    """

    query_basis: Tensor  # [b, h, T, R]
    key_basis: Tensor  # [b, h, S, R]
    decay: Tensor | None  # L [b, h, T]
    sequence: Tensor | None  # [T]
    causal: bool
    even: bool  # whether L is a line


class Window(NamedTuple):
    """The weights of one span. `b`, `h` and `n` are 1 where nothing depends on them."""

    tile: Tensor  # [b, h, n, C, C] w(i, j) within a chunk
    read: Tensor  # [b, h, n, C, R] what a query takes from the state before its chunk
    write: Tensor  # [b, h, n, C, R] what a key leaves in the state after its chunk
    edges: Tensor | None = None  # [b, h, n + 1] L before the first chunk and at the end of each
    sequences: Tensor | None = None  # [1, 1, n + 1] the packed sequences there
    after: Tensor | None = None  # [b, h, n, C, 1] a factor of each query's sums, for `Store`, and
    before: Tensor | None = None  # [b, h, n, C, 1] of each key: the decay, where no tile has it


class Fading(NamedTuple):
    """What a decay makes of one span's weights. `n` is 1 where all chunks fade alike."""

    edges: Tensor  # [b, h, n + 1] as in a window
    tile: Tensor | None  # [b, h, n, C, C] exp(L_i − L_j) of pairs j ≤ i, finite above the diagonal
    read: Tensor  # [b, h, n, C or 1, 1] since the end of the chunk before
    write: Tensor  # [b, h, n, C or 1, 1] until the end of the chunk
    after: Tensor | None = None  # [b, h, n, C, 1] as in a window; the product with
    before: Tensor | None = None  # [b, h, n, C, 1] is exp(L_i − L_j), instead of a tile


class Windows:
    """w(i, j) over one axis of positions, cut into the windows of its spans."""

    def __init__(self, pattern: Pattern, spans: Spans) -> None:
        self._query, self._key = cut(pattern.query_basis, spans), cut(pattern.key_basis, spans)
        self._decay, self._sequence, self._even = pattern.decay, pattern.sequence, pattern.even
        self._fadings: dict[tuple[int, int] | None, Fading] = {}
        self.spans, self.states = spans, pattern.query_basis.shape[-1]
        self._tiles: dict[tuple[int, bool], Tensor] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """What memory the weights of a span take."""
        return () if self._decay is None or self._even else ("tile",)

    def window(self, n: int, into: Tensor | None, *, reverse: bool, strict: bool) -> Window:
        """Forward: queries read, keys write. In reverse they change places and the tile turns.

        `into` is memory for a tile that serves one span alone.
        """
        span, query, key = self.spans[n], self._query[n], self._key[n]
        if self._decay is None:
            window = Window(self._tile(query, key, None, span, strict), query, key)
        else:
            fading = self._fading(self._decay, span, query.dtype, into)
            window = Window(
                self._tile(query, key, fading.tile, span, strict),
                query * fading.read,
                key * fading.write,
                fading.edges,
                after=fading.after,
                before=fading.before,
            )
        if self._sequence is not None:
            window = _separated(window, *_with_edges(self._sequence[None, None], span, -1))
        if not reverse:
            return window
        return window._replace(
            tile=window.tile.mT,
            read=window.write,
            write=window.read,
            after=window.before,
            before=window.after,
        )

    def _fading(self, decay: Tensor, span: Span, dtype: torch.dtype, into: Tensor | None) -> Fading:
        """The decays of a span; an even decay is made once for all spans of one size."""
        # a padded span is the only one, and may have a symbolic size
        like = None if span.padded else (span.chunks, span.chunk_length)
        if like in self._fadings:
            return self._fadings[like]
        fading = _fading(*_with_edges(decay, span, 0.0), dtype, into, even=self._even)
        if self._even and like:
            self._fadings[like] = fading
        return fading

    def _tile(
        self, query: Tensor, key: Tensor, faded: Tensor | None, span: Span, strict: bool
    ) -> Tensor:
        """w(i, j) on and below the diagonal, or below it; `faded` is exp(L_i − L_j), if needed."""
        like = (span.chunk_length, strict)
        tile = self._tiles.get(like)
        if tile is None:
            alike = self._sequence is None  # packed sequences start again, each with its own angle
            if alike:  # only i − j matters, so one chunk's tile serves all
                query, key = query[:, :, :1], key[:, :, :1]
            causal = _causal(span.chunk_length, query.device, strict=strict)
            tile = (query @ key.mT).masked_fill(~causal, 0)
            if faded is not None and self._even:
                tile = tile * faded
            if alike:
                self._tiles[like] = tile
        return tile if faded is None or self._even else faded.mul_(tile)


def _fading(
    total: Tensor, edges: Tensor, dtype: torch.dtype, into: Tensor | None, *, even: bool
) -> Fading:
    """exp(L_i − L_j): `total` is L `[b, h, n, C]`, `edges` is L at the edges of chunks.

    Where no chunk loses much it is exp(L_i − M) of row i times exp(M − L_j) of row j, with M in the
    middle of what the chunk loses. That spares a tile of each chunk's own.
    """
    before, end = edges[..., :-1, None], edges[..., 1:, None]
    lost = before - end
    if not even and _mild(lost):
        half = lost / 2
        after = (total - (before - half)).exp_()[..., None]
        until_middle = half.neg_().exp_().to(dtype)[..., None]
        factors = (after.to(dtype), after.reciprocal().to(dtype))
        return Fading(edges, None, until_middle, until_middle, *factors)
    until_end = (end - total).to(dtype).exp_()[..., None]  # the last chunk may end early
    if even:
        total, before = total[:, :, :1], before[:, :, :1]
    since_before = (total - before).to(dtype).exp_()[..., None]
    return Fading(edges, _differences(total, dtype, into), since_before, until_end)


def _mild(lost: Tensor) -> bool:
    """Whether every chunk loses little; asked only where that waits for nothing and is allowed."""
    return not under_mode() and lost.is_cpu and bool((lost < MILD).all())


def _differences(total: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """exp(L_i − L_j) for j ≤ i in a chunk, `[b, h, n, C, C]`, 1 where j > i: L never rises."""
    later, earlier = total[..., :, None], total[..., None, :]
    if into is None or into.shape[:3] != total.shape[:3]:
        return (later - earlier).to(dtype).clamp_(max=0).exp_()
    return torch.sub(later, earlier, out=into).clamp_(max=0).exp_()


def _separated(window: Window, number: Tensor, edges: Tensor) -> Window:
    """Weights between packed sequences set to zero: `number` `[1, 1, n, C]` counts them."""
    before, end = edges[..., :-1, None], edges[..., 1:, None]
    return window._replace(
        tile=window.tile.masked_fill(number[..., :, None] != number[..., None, :], 0),
        read=window.read.masked_fill((number != before)[..., None], 0),
        write=window.write.masked_fill((number != end)[..., None], 0),
        sequences=edges,
    )


def run(
    pattern: Pattern,
    spans: Plan,
    y: Load,
    z: Load,
    state: Tensor,
    x: Reader,
    mirror: Reader | None = None,
    *,
    reverse: bool = False,
) -> Tensor:
    """Serve the readers span by span; the last state, `[B, H, R, y, z]` like the first.

    `x` gets Σ w (x_i·y_j) z_j. `mirror` reads the same sums with y and z in each other's place.
    """
    flat = state.flatten(2, 3)
    decays_between = pattern.decay is not None and bool(spans.queries and spans.keys)
    if pattern.causal or pattern.sequence is not None or decays_between:
        windows = Windows(pattern, spans.queries)
        if pattern.causal:
            last = sweep(y, z, windows, flat, x, mirror, reverse=reverse)
            return last.unflatten(2, state.shape[2:4])
        _both_ways(y, z, windows, flat, x, mirror, reverse=reverse)
        return state
    at_queries, at_keys, decay = pattern.query_basis, pattern.key_basis, pattern.decay
    kept: float | Tensor = 1.0  # how much of a state is left after the keys
    if decay is not None and spans.keys:
        end = decay[..., -1:]
        at_keys = at_keys * (end - decay).exp()[..., None].to(at_keys.dtype)
        kept = end.exp()[..., None].to(flat.dtype)
    elif decay is not None:
        at_queries = at_queries * decay.exp()[..., None].to(at_queries.dtype)
    if reverse:
        read, readers = at_keys, spans.keys
        flat = gather(y, z, at_queries, flat, spans.queries)
        last = flat * kept
    else:
        read, readers = at_queries, spans.queries
        flat = last = gather(y, z, at_keys, flat * kept, spans.keys)
    scatter(x, read, flat, readers)
    if mirror is not None:
        scatter(mirror, read, _turn(flat[:, :, None], read.shape[-1], None)[:, :, 0], readers)
    return last.unflatten(2, state.shape[2:4])


def _both_ways(
    y: Load,
    z: Load,
    windows: Windows,
    state: Tensor,
    x: Reader,
    mirror: Reader | None,
    *,
    reverse: bool,
) -> None:
    """All pairs (of each packed sequence): those of a causal sweep, and the others by another.

    Queries and keys stand at the same positions, so w(i, j) = w(j, i) and either direction serves.
    """

    def halves(reader: Reader) -> tuple[Reader, Reader]:
        kept: dict[int, Tensor] = {}

        def keep(n: int, sums: Tensor, factor: Tensor | None) -> None:
            kept[n] = sums.clone() if factor is None else sums * factor

        def add(n: int, sums: Tensor, factor: Tensor | None) -> None:
            causal, others = kept.pop(n), sums if factor is None else sums * factor
            if reader.store_signed is None:
                reader.store(n, causal + others, None)
            else:
                reader.store_signed(n, causal + others, causal - others)

        return Reader(reader.load, keep), Reader(reader.load, add)

    first, second = halves(x)
    other_first, other_second = halves(mirror) if mirror else (None, None)
    sweep(y, z, windows, state, first, other_first, reverse=reverse)
    sweep(y, z, windows, state, second, other_second, reverse=not reverse, strict=True)


def sweep(
    y: Load,
    z: Load,
    windows: Windows,
    state: Tensor,
    x: Reader,
    mirror: Reader | None = None,
    *,
    reverse: bool = False,
    strict: bool = False,
) -> Tensor:
    """Hand each span's rows to the readers and return the state `[B, H, R·y, z]` at the end."""
    first, parts = state, (SWEEP if mirror is None else MIRRORED) + windows.parts
    with Workspace(state, windows.states, windows.spans, parts, fresh=under_mode()) as buffers:
        for n, memory in list(enumerate(buffers))[:: -1 if reverse else 1]:
            columns, values, rows = y(n, memory.y), z(n, memory.z), x.load(n, memory.x.rows)
            window = windows.window(n, memory.tile, reverse=reverse, strict=strict)
            if window.before is not None:
                columns = torch.mul(columns, window.before, out=memory.y)
            written = _scale(columns, window.write, memory.written).mT
            earlier, state = _accumulate(written, values, state, window, memory.edges, reverse)
            sums = _read(rows, window, columns, values, earlier, memory.scores, memory.x)
            x.store(n, sums, window.after)
            if mirror is not None:
                turned = _turn(earlier, windows.states, memory.turned)
                rows = mirror.load(n, memory.mirror.rows)
                into = (memory.scores, memory.mirror)
                sums = _read(rows, window, values, columns, turned, *into)
                mirror.store(n, sums, window.after)
        return state if state is first else state.clone()


def gather(y: Load, z: Load, write: Tensor, state: Tensor, spans: Spans) -> Tensor:
    """The state after all rows, in any order: `state` + Σ_j ψ(j) y_j z_jᵀ."""
    with Workspace(state, write.shape[-1], spans, GATHER, fresh=under_mode()) as buffers:
        for n, (psi, memory) in enumerate(zip(cut(write, spans), buffers, strict=True)):
            columns, values = y(n, memory.y), z(n, memory.z)
            written = _scale(columns, psi, memory.written).mT
            state = state + _product(written, values, None).sum(2)
    return state


def scatter(x: Reader, read: Tensor, state: Tensor, spans: Spans) -> None:
    """Hand out what every row reads from one and the same state."""
    with Workspace(state, read.shape[-1], spans, SCATTER, fresh=under_mode()) as buffers:
        for n, (psi, memory) in enumerate(zip(cut(read, spans), buffers, strict=True)):
            rows = _scale(x.load(n, memory.x.rows), psi, memory.x.scaled)
            same = state[:, :, None].expand(-1, -1, psi.shape[2], -1, -1)
            x.store(n, _product(rows, same, memory.x.sums), None)


def _read(
    rows: Tensor,
    window: Window,
    columns: Tensor,
    values: Tensor,
    earlier: Tensor,
    scores: Tensor | None,
    memory: Reading,
) -> Tensor:
    """The rows' sums over their own chunk, by a tile of scores, and over earlier ones."""
    scores = _product(rows, columns.mT, scores).mul_(window.tile)
    near = _product(scores, values, memory.sums)
    return _add_product(near, _scale(rows, window.read, memory.scaled), earlier)


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


def _turn(state: Tensor, states: int, into: Tensor | None) -> Tensor:
    """`[B, H, n, R·y, z]` as `[B, H, n, R·z, y]`."""
    turned = state.unflatten(3, (states, -1)).mT
    if into is None:
        return turned.flatten(3, 4)
    into.unflatten(3, (states, -1)).copy_(turned)
    return into


def _with_edges(values: Tensor, span: Span, first: float) -> tuple[Tensor, Tensor]:
    """Values `[b, h, T]` as `[b, h, n, C]`, and those at the edges of chunks `[b, h, n + 1]`."""
    if span.start:
        before_span = values[..., span.start - 1 : span.start]
    else:
        before_span = torch.full_like(values[..., :1], first)
    values = values[..., span.rows]
    if span.padded:
        chunks = repeat_last(values, span)
    else:
        chunks = values.unflatten(2, (-1, span.chunk_length))
    return chunks, torch.cat([before_span, chunks[..., -1]], -1)


def _causal(length: int, device: torch.device, *, strict: bool = False) -> Tensor:
    index = torch.arange(length, device=device)
    return index[:, None] > index if strict else index[:, None] >= index


def _scale(rows: Tensor, basis: Tensor, scaled: Tensor | None) -> Tensor:
    """Rows `[…, C, d]` times each of the R basis functions: `[…, C, R·d]`."""
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
    window: Window,
    edges: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The state before each chunk `[B, H, n, R·y, z]`, and the one after the last.

    `edges` is memory for the states at all edges, if they are to be summed one by one.
    """
    # Edges run one more than chunks: an update belongs to the edge after its chunk.
    if edges is not None:
        states = edges.unbind(2)[:: -1 if reverse else 1]
        states[0].copy_(state)
        _product(written, values, edges[:, :, :-1] if reverse else edges[:, :, 1:])
        kept = _kept_by_chunks(window)
        if kept is None:
            for before, after in pairwise(states):
                after.add_(before)
        else:
            left = kept.to(state.dtype)[..., None, None].unbind(2)[:: -1 if reverse else 1]
            for share, (before, after) in zip(left, pairwise(states), strict=True):
                after.addcmul_(before, share)
    else:
        update = _product(written, values, None)
        if window.edges is not None or window.sequences is not None:
            # Inductor of PyTorch 2.13 cannot keep a square of n + 1 if n is symbolic.
            chunks = written.shape[2]
            its, others = (chunks, slice(chunks)) if reverse else (0, slice(1, None))
            of_update = _kept_between_edges(window, others, reverse=reverse).to(state.dtype)
            of_state = _kept_between_edges(window, slice(its, its + 1), reverse=reverse)
            edges = (of_update @ update.flatten(3)).unflatten(3, update.shape[3:])
            edges = edges + of_state.to(state.dtype)[..., None] * state[:, :, None]
        elif reverse:
            edges = torch.cat([update, state[:, :, None]], 2).flip(2).cumsum(2).flip(2)
        else:
            edges = torch.cat([state[:, :, None], update], 2).cumsum(2)  # [B, H, n + 1, R·y, z]
    if reverse:
        return edges[:, :, 1:], edges[:, :, 0]
    return edges[:, :, :-1], edges[:, :, -1]


def _kept_by_chunks(window: Window) -> Tensor | None:
    """How much of the state before a chunk is left after it, `[b, h, n]`; None: all of it."""
    kept = None if window.edges is None else window.edges.diff(dim=-1).exp_()
    if window.sequences is None:
        return kept
    same = window.sequences[..., 1:] == window.sequences[..., :-1]
    return same if kept is None else kept * same


def _kept_between_edges(window: Window, some: slice, *, reverse: bool) -> Tensor:
    """How much of the state at some edges is left at every later one, `[b, h, n + 1, some]`.

    In reverse it is left at every earlier one.
    """
    of = window.edges if window.edges is not None else window.sequences
    assert of is not None
    index = torch.arange(of.shape[-1], device=of.device)
    kept = index[:, None] <= index[some] if reverse else index[:, None] >= index[some]
    if window.sequences is not None:
        kept = kept & (window.sequences[..., :, None] == window.sequences[..., None, some])
    if window.edges is not None:
        lost = window.edges[..., :, None] - window.edges[..., None, some]
        kept = (-lost if reverse else lost).masked_fill(~kept, -torch.inf).exp_()
    return kept
