"""The delta rule by kernels: each chunk for itself but for one short chain of memories.

A chunk changes the memory linearly, and so does a segment of chunks. Where there are few heads,
programs first find what every segment makes of any memory; then each begins where it should.
The backward pass keeps the inputs and that of the segments, and makes the rest again.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.mechanisms.linear.delta_rule import delta_rule, units
from cosformer.ops.problem import least_gate
from cosformer.runtime import has_room, kernels_serve, on_device_of, recorded

FEWEST = 64
"""Columns of a product at the least: Triton 3.6 multiplies fewer wrongly."""
PROGRAMS = 264
"""Programs that fill a GPU: two for each of an H200's 132 multiprocessors."""
CHUNK = 64
WIDEST = 128
"""Columns, whose tiles must fit in registers; more than `FEWEST` take much shared memory."""


class Given(NamedTuple):
    """q, k and v with any strides; β and gates in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gates: Tensor

    @property
    def blocks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.k.shape[2] // CHUNK)

    def room(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """`[B, H_kv, …]` for what kernels hand on; float16 would overflow."""
        kept = torch.bfloat16 if self.q.dtype == torch.bfloat16 else torch.float32
        return self.k.new_empty(*self.k.shape[:2], *shape, dtype=dtype or kept)

    def chain(self, factor: Tensor) -> "Chain":
        """Room for a chain."""
        (length, width), columns = self.k.shape[2:], self.v.shape[3]
        states = self.room(self.blocks, width, columns)
        return Chain(self.room(length, width), self.room(length, columns), factor, states)


class Chain(NamedTuple):
    """x = x₀ + a S and S ← e^(G_C) S + r + kᵀ (f x), chunk after chunk."""

    a: Tensor  # [B, H_kv, T, D]
    x: Tensor  # [B, H_kv, T, V]: x₀, then x
    factor: Tensor  # [B, H_kv, T] float32: f
    states: Tensor  # [B, H_kv, n, D, V]: r, then S


class Segments(NamedTuple):
    """How a sequence is cut."""

    steps: int  # chunks in a segment
    moves: Tensor  # [B, H_kv, segments, D, D] float32: what a segment makes of a memory
    ends: Tensor  # [B, H_kv, segments, D, V] float32: and adds to it


def is_served(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> bool:
    """Whether kernels take these tensors: q, k, v of one type, and a memory in float32."""
    alike = q.dtype == k.dtype == v.dtype and memory.dtype == torch.float32
    served = alike and all(kernels_serve(x) for x in (q, k, v, memory))
    width = max(q.shape[3], v.shape[3])
    return served and (width <= FEWEST or (width <= WIDEST and has_room(q)))


def delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, V]` in the dtype of q, and the memory after these tokens.

    Args:
        q, k, v: as `delta_rule` takes them, but of any norm; the output is that of q/√D.
        beta, log_decay, memory: as it takes them.
    """
    by = by_kernel if is_served(q, k, v, memory) else by_formula
    return by(q, k, v, beta, log_decay, memory)


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta` in plain torch."""
    out, memory = delta_rule(*units(q, k, memory.dtype), v, beta, log_decay, memory)
    return out.to(q.dtype), memory


def by_kernel(*given: Tensor) -> tuple[Tensor, Tensor]:
    """`delta` by Triton's kernels."""
    out, memory = _Delta.apply(*given)
    return out, memory


class _Delta(Function):
    """Derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *rows, memory = _plain(inputs)
        with on_device_of(memory):
            out, last, segments = _forward(Given(*rows), memory)
        ctx.steps = segments.steps
        ctx.save_for_backward(*inputs, segments.moves, segments.ends)
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, moves, ends = ctx.saved_tensors
        segments = Segments(ctx.steps, moves, ends)
        if recorded():
            return tuple(_formula_gradients(inputs, ctx.needs_input_grad, grads))
        *rows, memory = _plain(inputs)
        with on_device_of(memory):
            found = _backward(Given(*rows), memory, segments, *grads)
        return tuple(x.to(given.dtype) for x, given in zip(found, inputs, strict=True))


def _formula_gradients(
    inputs: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of the formula, with a graph of their own, for the inputs that need one.

    An input may be another one, or follow from it: views keep apart what autograd adds up itself.
    """
    with torch.enable_grad():
        views = [x.view_as(x) for x in inputs]
        asked = [x for x, needed in zip(views, needs, strict=True) if needed]
        slopes = iter(torch.autograd.grad(by_formula(*views), asked, grads, create_graph=True))
    return [next(slopes) if needed else None for needed in needs]


def _plain(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The inputs, those after q, k and v in float32 and in one piece."""
    q, k, v, *others = inputs
    return q, k, v, *(x.to(torch.float32).contiguous() for x in others)


def _forward(rows: Given, memory: Tensor) -> tuple[Tensor, Tensor, Segments]:
    sums, chain = _prepare(rows)
    batch, heads, length, width = rows.k.shape
    columns = rows.v.shape[3]
    steps = _segment_steps(batch * heads * -(-columns // FEWEST), length)
    count = -(-rows.blocks // steps)
    moves, ends = (rows.room(count, width, n, dtype=torch.float32) for n in (width, columns))
    segments = Segments(steps, moves, ends)
    if count > 1:
        _carry(rows, sums, chain, segments)
    last = _carry(rows, sums, chain, segments, memory)
    return _read(rows, sums, chain), last, segments


def _backward(
    rows: Given, memory: Tensor, segments: Segments, grad: Tensor, of_last: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, β, gates and memory."""
    erased = torch.empty_like(rows.beta)  # the factor of the chain back
    solver = rows.room(rows.blocks, CHUNK, CHUNK)  # T
    sums, chain = _prepare(rows, erased, solver)
    _carry(rows, sums, chain, segments, memory)
    reverse = _ask(rows, grad, sums, chain.factor, erased, solver)
    segments = segments._replace(ends=torch.empty_like(segments.ends))
    if segments.ends.shape[2] > 1:
        _carry(rows, sums, reverse, segments, back=True)
    of_memory = _carry(rows, sums, reverse, segments, of_last.contiguous(), back=True)
    return *_gradients(rows, grad, sums, chain, reverse), of_memory


def _prepare(
    rows: Given, erased: Tensor | None = None, solver: Tensor | None = None
) -> tuple[Tensor, Chain]:
    """G `[B, H_kv, T]` in float64, and the chain; fills what the way back needs."""
    from cosformer.mechanisms.linear.delta_kernels import prepare_kernel

    sums = rows.room(rows.k.shape[2], dtype=torch.float64)
    chain = rows.chain(torch.empty_like(rows.beta))
    made = sums, chain.factor, erased, solver, chain.a, chain.x
    _launch(
        prepare_kernel, rows, rows.k, (rows.k, rows.v, rows.beta, rows.gates, *made),
        (*rows.k.stride(), *rows.v.stride()), FLOOR=least_gate(torch.float32),
    )  # fmt: skip
    return sums, chain


def _carry(
    rows: Given,
    sums: Tensor,
    chain: Chain,
    segments: Segments,
    begin: Tensor | None = None,
    back: bool = False,
) -> Tensor:
    """The memory at the end of the chain; or, with none to begin with, fills `segments`."""
    from cosformer.mechanisms.linear.delta_kernels import carry_kernel

    last = rows.room(*segments.ends.shape[3:], dtype=torch.float32)
    (batch, heads, length, width), count = rows.k.shape, segments.ends.shape[2]
    whole = begin is not None
    columns = -(-rows.v.shape[3] // FEWEST) + (0 if whole or back else -(-width // FEWEST))
    carry_kernel[(columns * count * batch * heads,)](
        rows.k, chain.factor, sums, chain.a, chain.x, chain.states,
        segments.moves, segments.ends, begin, last,
        count, segments.steps, rows.blocks, length, heads, *rows.k.stride(),
        COLUMNS=columns, BACK=back, WHOLE=whole, **_options(rows), num_stages=2,
    )  # fmt: skip
    return last


def _read(rows: Given, sums: Tensor, chain: Chain) -> Tensor:
    from cosformer.mechanisms.linear.delta_kernels import read_kernel

    out = rows.q.new_empty(*rows.q.shape[:3], rows.v.shape[3])
    _launch(
        read_kernel, rows, rows.q, (rows.q, rows.k, sums, chain.states, chain.x, out),
        (_scale(rows), *rows.q.stride(), *rows.k.stride()), GROUPS=_groups(rows),
    )  # fmt: skip
    return out


def _ask(
    rows: Given, grad: Tensor, sums: Tensor, written: Tensor, erased: Tensor, solver: Tensor
) -> Chain:
    """The chain back."""
    from cosformer.mechanisms.linear.delta_kernels import ask_kernel

    chain = rows.chain(erased)
    _launch(
        ask_kernel, rows, rows.k,
        (rows.q, rows.k, grad, sums, written, solver, chain.a, chain.x, chain.states),
        (_scale(rows), *rows.q.stride(), *rows.k.stride(), *grad.stride()), GROUPS=_groups(rows),
    )  # fmt: skip
    return chain


def _gradients(
    rows: Given, grad: Tensor, sums: Tensor, chain: Chain, reverse: Chain
) -> tuple[Tensor, ...]:
    from cosformer.mechanisms.linear.delta_kernels import gradients_kernel

    found = tuple(x.new_empty(x.shape) for x in rows)
    strides = [stride for x in (*rows[:3], grad) for stride in x.stride()]
    _launch(
        gradients_kernel, rows, rows.k,
        (*rows, grad, sums, chain.states, chain.x, reverse.states, reverse.x, *found),
        (_scale(rows), *strides), FLOOR=least_gate(torch.float32), GROUPS=_groups(rows),
        maxnreg=None,  # or it keeps three times as much of a thread in memory
    )  # fmt: skip
    return found


def _launch(
    kernel: Any,
    rows: Given,
    over: Tensor,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    **options: Any,
) -> None:
    """Run a kernel, a program for each chunk of each head of the tensor `over`."""
    batch, heads, length, _ = over.shape
    kernel[(rows.blocks * heads * batch,)](
        *tensors, rows.blocks, length, heads, *numbers, **_options(rows) | options, num_stages=1
    )


def _options(rows: Given) -> dict[str, Any]:
    width, short = rows.k.shape[3], rows.q.dtype == torch.bfloat16
    return {
        "D": width,
        "V": rows.v.shape[3],
        "BLOCK_D": max(FEWEST, 1 << (width - 1).bit_length()),
        "BLOCK_V": FEWEST,
        "SHORT": short,
        "PRECISION": "tf32x3" if rows.q.dtype == torch.float32 else "tf32",
        "C": CHUNK,
        "num_warps": 4,
        # three programs share a multiprocessor
        "maxnreg": 168 if short and width <= FEWEST else None,
    }


def _segment_steps(programs: int, length: int) -> int:
    """Chunks in a segment: all where there are programs enough without cutting."""
    segments = max(1, min(PROGRAMS // max(1, programs), length // (4 * CHUNK)))
    return max(1, -(-length // (segments * CHUNK)))


def _groups(rows: Given) -> int:
    return rows.q.shape[1] // rows.k.shape[1]


def _scale(rows: Given) -> float:
    return 1 / math.sqrt(rows.q.shape[3])
