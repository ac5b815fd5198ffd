"""How a sequence is cut into chunks, and chunks into spans that are computed at once.

Fresh pages cost a CPU as much as the work on them, so the spans of a sweep share one workspace, and
a thread keeps its last one for the next call, if it is small.
"""

import functools
import math
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_LENGTH = 64  # a longer chunk means larger products, but more of them above the diagonal
CPU_CHUNKS = 64  # chunks × heads in flight: so many that Python is idle, few enough for a cache
GPU_CHUNKS = 2048  # enough to fill the chip; the states in flight stay below a gigabyte
FEW_CHUNKS = 64  # up to here states are summed one by one
KEPT_BYTES = 2**25  # the largest workspace that a thread keeps between calls

_kept = threading.local()


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


Spans = tuple[Span, ...]


class Plan(NamedTuple):
    """The spans of queries and of keys, which are the same where query i stands at key i."""

    queries: Spans
    keys: Spans


def plan(queries: int, keys: int, heads: int, device: str) -> Plan:
    """How both sequences are cut for so many heads of the whole batch."""
    return Plan(_spans(queries, heads, device), _spans(keys, heads, device))


def whole(queries: int, keys: int) -> Plan:
    """Each sequence as one span of one chunk."""
    return Plan((Span(0, queries, 1, queries),), (Span(0, keys, 1, keys),))


def _spans(length: int, heads: int, device: str) -> Spans:
    """Under torch.compile one span takes all, so that the length may be symbolic.

    A graph of torch.export gets three chunks at the least: no size in it, nor one less, may be 1
    where it is symbolic.
    """
    if not torch.compiler.is_compiling():
        return _cut_spans(length, heads, device)
    if isinstance(length, int) and length == 0:
        return ()
    if torch.compiler.is_exporting():
        return (Span(0, length, length // CHUNK_LENGTH + 3, CHUNK_LENGTH, padded=True),)
    chunks = (length + CHUNK_LENGTH - 1) // CHUNK_LENGTH
    return (Span(0, length, chunks, CHUNK_LENGTH, padded=chunks * CHUNK_LENGTH != length),)


@functools.lru_cache(64)
def _cut_spans(length: int, heads: int, device: str) -> Spans:
    """As many whole chunks at once as the device likes; what is left over is a chunk of its own."""
    wanted = CPU_CHUNKS if device == "cpu" else GPU_CHUNKS
    group = max(1, wanted // max(1, heads)) * CHUNK_LENGTH
    end = length - length % CHUNK_LENGTH
    spans = []
    for start in range(0, end, group):
        stop = min(start + group, end)
        spans.append(Span(start, stop, (stop - start) // CHUNK_LENGTH, CHUNK_LENGTH))
    if end < length:
        spans.append(Span(end, length, 1, length - end))
    return tuple(spans)


def cut(rows: Tensor, spans: Spans) -> list[Tensor]:
    """`[B, H, T, d]` as one `[B, H, n, C, d]` for each span: views, but for padding with zeros."""
    batch, heads, _, width = rows.shape
    return [
        _padded(rows, span)
        if span.padded
        else rows.narrow(2, span.start, span.stop - span.start).view(
            batch, heads, span.chunks, span.chunk_length, width
        )
        for span in spans
    ]


def sink(into: Tensor, spans: Spans) -> Callable[[int, Tensor, Tensor | None], None]:
    """A function that writes rows `[B, H, n, C, d]` of span n to where they belong in `into`.

    Factors of the rows, if there are any, cost no pass of their own.
    """
    padded = len(spans) > 0 and spans[0].padded  # PyTorch 2.11 traces no bool of a tuple
    pieces = [] if padded else cut(into, spans)

    def put(n: int, rows: Tensor, factor: Tensor | None) -> None:
        if padded:
            _put_padded(into, spans[n], rows if factor is None else rows * factor)
        elif factor is None:
            pieces[n].copy_(rows)
        else:
            torch.mul(rows, factor, out=pieces[n])

    return put


def repeat_last(rows: Tensor, span: Span) -> Tensor:
    """The span's rows in chunks, the last row repeated.

    By index: of all ways to pad, the one that puts no condition on a symbolic length.
    """
    index = _padded_index(span, rows.device)
    return rows[:, :, index.clamp(max=span.stop - span.start - 1)]


def _padded(rows: Tensor, span: Span) -> Tensor:
    beyond = _padded_index(span, rows.device) >= span.stop - span.start
    return repeat_last(rows[:, :, span.rows], span).masked_fill(beyond[..., None], 0)


def _put_padded(into: Tensor, span: Span, rows: Tensor) -> None:
    index = torch.arange(span.stop - span.start, device=rows.device)
    into[:, :, span.rows] = rows.flatten(2, 3)[:, :, index]


def _padded_index(span: Span, device: torch.device) -> Tensor:
    chunk = torch.arange(span.chunks, device=device)[:, None]
    return chunk * span.chunk_length + torch.arange(span.chunk_length, device=device)  # [n, C]


class Reading(NamedTuple):
    """Memory for the rows that read the sums of a span, and for what they get."""

    rows: Tensor | None = None  # [B, H, n, C, y]
    scaled: Tensor | None = None  # [B, H, n, C, R·y]
    sums: Tensor | None = None  # [B, H, n, C, z]


class Buffers(NamedTuple):
    """Memory for one span; None where a sweep has no part for it, or must not write into memory."""

    y: Tensor | None = None  # [B, H, n, C, y]
    z: Tensor | None = None  # [B, H, n, C, z]
    written: Tensor | None = None  # [B, H, n, C, R·y], shared with what is read scaled
    scores: Tensor | None = None  # [B, H, n, C, C]
    tile: Tensor | None = None  # [B, H, n, C, C], weights of which no two chunks have the same
    edges: Tensor | None = None  # [B, H, n + 1, R·y, z], the states between chunks
    turned: Tensor | None = None  # [B, H, n, R·z, y], the same with y and z in each other's place
    x: Reading = Reading()
    mirror: Reading = Reading()  # y and z in each other's place


class Workspace:
    """The memory that the spans of a sweep share, laid out chunk by chunk, as products read it.

    `state` is `[B, H, R·y, z]` with R = `states`; `parts` names what the sweep will use. `fresh`:
    whether memory of another call must not serve, nor this one's be kept.

    >>> with Workspace(state, 2, spans, SWEEP, fresh=False) as buffers:  # one Buffers for each span
    """

    def __init__(
        self, state: Tensor, states: int, spans: Spans, parts: Collection[str], *, fresh: bool
    ) -> None:
        self._memory: Tensor | None = None
        self._fresh = fresh
        self._buffers = [Buffers()] * len(spans)
        if torch.compiler.is_compiling() or not spans:  # a graph must not write into memory
            return
        heads, y, z = state.shape[:2], state.shape[2] // states, state.shape[3]
        possible = _sizes(states, y, z, spans)
        sizes = {name: possible[name] * heads.numel() for name in parts if name in possible}
        aligned = [-(-size // 16) * 16 for size in sizes.values()]
        self._memory = _borrow(sum(aligned) * state.itemsize, state, fresh)
        pieces = self._memory[: sum(aligned) * state.itemsize].view(state.dtype).split(aligned)
        memory = dict(zip(sizes, pieces, strict=True))

        def view(name: str, chunks: int, rows: int, width: int) -> Tensor | None:
            if name not in memory:
                return None
            shape = (chunks, *heads, rows, width)
            return memory[name][: math.prod(shape)].view(shape).permute(1, 2, 0, 3, 4)

        def buffers(chunks: int, length: int) -> Buffers:
            def rows(name: str, width: int) -> Tensor | None:
                return view(name, chunks, length, width)

            def reading(y: int, z: int) -> Reading:
                return Reading(rows("x", y), rows("scaled", states * y), rows("sums", z))

            return Buffers(
                rows("y", y),
                rows("z", z),
                rows("scaled", states * y),
                rows("scores", length),
                rows("tile", length),
                view("edges", chunks + 1, states * y, z),
                view("turned", chunks, states * z, y),
                reading(y, z),
                reading(z, y) if "turned" in memory else Reading(),
            )

        shapes = [(span.chunks, span.chunk_length) for span in spans]
        made = {shape: buffers(*shape) for shape in set(shapes)}  # most spans are alike
        self._buffers = [made[shape] for shape in shapes]

    def __enter__(self) -> list[Buffers]:
        return self._buffers

    def __exit__(self, *error: object) -> None:
        memory = self._memory
        small = memory is not None and memory.is_cpu and memory.numel() <= KEPT_BYTES
        if small and not self._fresh:
            _kept.memory = memory


def forget() -> None:
    """Free the memory that this thread keeps."""
    _kept.memory = None


def _sizes(states: int, y: int, z: int, spans: Spans) -> dict[str, int]:
    """How many numbers a head needs for each part there is."""
    chunks = max(span.chunks for span in spans)
    length = max(span.chunk_length for span in spans)
    rows, state = chunks * length, states * y * z
    wide = max(y, z)  # a reader has rows of y and sums of z, a mirror the reverse
    sizes = {"x": rows * wide, "y": rows * y, "z": rows * z, "sums": rows * wide}
    sizes |= {"scaled": rows * states * wide, "scores": rows * length, "turned": chunks * state}
    sizes["tile"] = rows * length
    if chunks <= FEW_CHUNKS:
        sizes["edges"] = (chunks + 1) * state
    return sizes


def _borrow(size: int, like: Tensor, fresh: bool) -> Tensor:
    """At least `size` bytes: this thread's own on a CPU, unless they must be fresh."""
    if not like.is_cpu or fresh:
        return torch.empty(size, dtype=torch.uint8, device=like.device)
    memory: Tensor | None = getattr(_kept, "memory", None)
    _kept.memory = None  # whoever asks meanwhile gets other memory
    if memory is None or memory.numel() < size:
        memory = None  # the small piece is freed before there is a larger one
        with torch.inference_mode(False):  # it may be written to in any mode later
            memory = torch.empty(size, dtype=torch.uint8, device=like.device)
    return memory
