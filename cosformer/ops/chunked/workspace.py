"""Memory for what a sweep computes on its way.

Fresh pages cost a CPU as much as the work on them, so a thread keeps its last piece, if small.
"""

import math
import threading
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from cosformer.ops.chunked.chunks import Span

FEW_CHUNKS = 16  # up to here states are summed one by one
KEPT_BYTES = 2**25  # the largest piece that a thread keeps between calls

Into = Callable[[int], Tensor | None]  # a width -> memory for a span's rows of it, or None

_kept = threading.local()


class Scratch:
    """The memory that the spans of a sweep share, laid out chunk by chunk, as products read it.

    `state` is `[B, H, R·y, z]` with R = `states`; `parts` names what the sweep will take.

    >>> with Scratch(state, 2, spans, ("y", "z", "scaled")) as scratch: ...
    """

    def __init__(
        self, state: Tensor, states: int, spans: list[Span], parts: Collection[str]
    ) -> None:
        self._heads = state.shape[:2]
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, int, int], Tensor] = {}
        self._whole: Tensor | None = None
        if torch.compiler.is_compiling() or not spans:
            return
        y, z = state.shape[2] // states, state.shape[3]
        possible = _sizes(states, y, z, spans)
        sizes = {name: possible[name] * self._heads.numel() for name in parts if name in possible}
        aligned = [-(-size // 16) * 16 for size in sizes.values()]
        self._whole = _borrow(sum(aligned) * state.itemsize, state)
        pieces = self._whole[: sum(aligned) * state.itemsize].view(state.dtype).split(aligned)
        self._memory = dict(zip(sizes, pieces, strict=True))

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *error: object) -> None:
        if self._whole is not None:
            _give_back(self._whole)

    def take(self, name: str, chunks: int, rows: int, width: int) -> Tensor | None:
        """`[B, H, n, rows, width]`, with what the last user of that name left in it.

        None where it has no part, and under torch.compile and torch.export, whose graph must not
        write into memory.
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


def forget() -> None:
    """Let go of the memory that this thread keeps."""
    _kept.memory = None


def _sizes(states: int, y: int, z: int, spans: list[Span]) -> dict[str, int]:
    """How many numbers a head needs for each part there is."""
    chunks = max(span.chunks for span in spans)
    length = max(span.chunk_length for span in spans)
    rows, state = chunks * length, states * y * z
    wide = max(y, z)  # a reader has rows of y and sums of z, a mirror the reverse
    sizes = {"x": rows * wide, "y": rows * y, "z": rows * z, "sums": rows * wide}
    sizes |= {"scaled": rows * states * wide, "scores": rows * length, "turned": chunks * state}
    if chunks <= FEW_CHUNKS:
        sizes["edges"] = (chunks + 1) * state
    return sizes


def _borrow(size: int, like: Tensor) -> Tensor:
    """At least `size` bytes: this thread's own on a CPU, unless something traces the call."""
    if not like.is_cpu or _traced():
        return torch.empty(size, dtype=torch.uint8, device=like.device)
    memory: Tensor | None = getattr(_kept, "memory", None)
    _kept.memory = None  # whoever asks meanwhile gets other memory
    if memory is None or memory.numel() < size:
        memory = None  # two pieces at once would count twice
        with torch.inference_mode(False):  # it may be written to in any mode later
            memory = torch.empty(size, dtype=torch.uint8, device=like.device)
    return memory


def _give_back(memory: Tensor) -> None:
    if memory.is_cpu and memory.numel() <= KEPT_BYTES and not _traced():
        _kept.memory = memory


def _traced() -> bool:
    """Whether a mode sees every operation: make_fx, fake tensors, export before dispatch."""
    modes: int = torch._C._len_torch_dispatch_stack()
    return bool(modes or torch._ops._len_torch_dispatch_stack_pre_dispatch())
