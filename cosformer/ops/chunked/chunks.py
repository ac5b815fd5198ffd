"""How a sequence is cut into chunks, and chunks into spans that are computed at once."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_LENGTH = 64  # a longer chunk means larger products, but more of them above the diagonal
CPU_CHUNKS = 128  # chunks × heads in flight: so many that Python is idle, few enough to keep
GPU_CHUNKS = 2048  # enough to fill the chip; the states in flight stay below a gigabyte


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

    Under torch.compile one span takes all, so that the length may be symbolic. A graph of
    torch.export gets three chunks at the least: no size in it, nor one less, may be 1 where it is
    symbolic.
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


def fold(rows: Tensor, span: Span) -> Tensor:
    """The span's rows of `[B, H, T, d]` as `[B, H, n, C, d]`; padding is zeros."""
    if span.padded:
        index = _padded_index(span, rows.device)
        beyond = index >= span.stop - span.start
        return repeat_last(rows[:, :, span.rows], span).masked_fill(beyond[..., None], 0)
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


def repeat_last(rows: Tensor, span: Span) -> Tensor:
    """The span's rows in chunks, the last row repeated.

    By index: of all ways to pad, the one that puts no condition on a symbolic length.
    """
    index = _padded_index(span, rows.device)
    return rows[:, :, index.clamp(max=span.stop - span.start - 1)]


def _padded_index(span: Span, device: torch.device) -> Tensor:
    chunk = torch.arange(span.chunks, device=device)[:, None]
    return chunk * span.chunk_length + torch.arange(span.chunk_length, device=device)  # [n, C]


def to_multiple(x: Tensor, block: int) -> Tensor:
    """`[..., n, D]` with zeros at the end.

    Where none are missing `F.pad` would copy, and a graph would not know its strides.
    """
    missing = -x.shape[-2] % block
    return F.pad(x, (0, 0, 0, missing)) if missing else x
