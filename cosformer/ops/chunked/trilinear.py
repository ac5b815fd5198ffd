"""out_i = Σ_j w(i, j) (x_i·y_j) z_j with a state in and out: at once, or differentiably.

The map is linear in each of x, y, z and the state, so its gradients are the same map with the
roles changed:   dx = (dout, z, y)     dy = reversed (z, dout, x)     dz = reversed (y, x, dout).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from cosformer.ops.chunked.chunks import Plan, Spans, cut, plan, sink
from cosformer.ops.chunked.sweep import Load, Pattern, Reader, run
from cosformer.ops.problem import decay_gradient
from cosformer.runtime import (
    join_batch,
    join_shared,
    recorded,
    refuse_mapped,
    refuse_older_vmap,
)


class Result(NamedTuple):
    """Rows to read with, what to make of the sums they get, and the buffers that takes."""

    load: Load
    finish: Callable[[int, Tensor, Tensor], tuple[Tensor, ...]]
    """Linear in sums `[B, H, n, C, width]` and in signed sums: the same, or those that
    `Reader.store_signed` gets."""
    buffers: tuple[Tensor, ...]
    joins: bool = False  # whether `finish` adds heads
    signed: bool = False  # whether it looks at signed sums

    def reader(self, spans: Spans) -> Reader:
        sinks = [sink(buffer, spans) for buffer in self.buffers]

        def put_all(n: int, made: tuple[Tensor, ...], factor: Tensor | None) -> None:
            for put, rows in zip(sinks, made, strict=True):
                put(n, rows, factor)

        def store(n: int, sums: Tensor, factor: Tensor | None) -> None:
            if self.joins and factor is not None:
                sums, factor = sums * factor, None
            put_all(n, self.finish(n, sums, sums), factor)

        def store_signed(n: int, sums: Tensor, signed: Tensor) -> None:
            put_all(n, self.finish(n, sums, signed), None)

        return Reader(self.load, store, store_signed if self.signed else None)


def trilinear(
    pattern: Pattern,
    spans: Plan,
    y: Load,
    z: Load,
    state: Tensor,
    x: Result,
    mirror: Result | None = None,
    *,
    reverse: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `x` (and `mirror`, with y and z in each other's place) made of its sums; the last state.

    Spans go straight into the buffers, unless a graph is recorded or a transform of torch.func is
    at work, under which a buffer may lack the mapped dimension: then each side is one span.
    """
    if not recorded():
        readers = spans.keys if reverse else spans.queries
        other = mirror.reader(readers) if mirror else None
        state = run(pattern, spans, y, z, state, x.reader(readers), other, reverse=reverse)
        return x.buffers + (mirror.buffers if mirror else ()), state
    columns, values = (load(0, None).flatten(2, 3) for load in (y, z))

    def read(by: Result, y: Tensor, z: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        rows = by.load(0, None).flatten(2, 3)
        about = (pattern.decay, pattern._replace(decay=None), reverse)
        sums, last = _Trilinear.apply(rows, y, z, state, *about)
        sums = sums[:, :, None]
        return tuple(rows.flatten(2, 3) for rows in by.finish(0, sums, sums)), last

    results, last = read(x, columns, values, state)
    if mirror is not None:
        results += read(mirror, values, columns, state.mT)[0]
    return results, last


class _Trilinear(Function):
    """The map on whole tensors, differentiable to any order."""

    @staticmethod
    def forward(
        x: Tensor,
        y: Tensor,
        z: Tensor,
        state: Tensor,
        decay: Tensor | None,
        pattern: Pattern,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        pattern = pattern._replace(decay=decay)
        out = x.new_empty(*x.shape[:3], z.shape[-1])
        lengths = (pattern.query_basis.shape[2], pattern.key_basis.shape[2])
        spans = plan(*lengths, state.shape[0] * state.shape[1], state.device.type)
        readers, written = (spans.keys, spans.queries) if reverse else (spans.queries, spans.keys)
        reader = Reader(_rows_of(x, readers), sink(out, readers))
        columns, values = _rows_of(y, written), _rows_of(z, written)
        last = run(pattern, spans, columns, values, state, reader, reverse=reverse)
        return out, last.clone() if last is state else last

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, y, z, state, decay, pattern, ctx.reverse = inputs
        _, last = output
        ctx.causal, ctx.even = pattern.causal, pattern.even
        constants = (pattern.query_basis, pattern.key_basis, pattern.sequence)
        ctx.save_for_backward(x, y, z, state, decay, last, *constants)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        refuse_older_vmap(grad_out, grad_last)
        x, y, z, state, decay, last, query_basis, key_basis, sequence = ctx.saved_tensors
        pattern = Pattern(query_basis, key_basis, None, sequence, ctx.causal, ctx.even)
        there, back = ctx.reverse, not ctx.reverse
        dx, _ = _Trilinear.apply(grad_out, z, y, state.mT, decay, pattern, there)
        dy, _ = _Trilinear.apply(z, grad_out, x, grad_last.mT, decay, pattern, back)
        dz, dstate = _Trilinear.apply(y, x, grad_out, grad_last, decay, pattern, back)
        grad_decay = None
        if decay is not None:
            by_x, by_y = (x * dx).sum(-1, keepdim=True), (y * dy).sum(-1, keepdim=True)
            if ctx.reverse:
                grad_decay = decay_gradient(by_y, by_x, state * dstate, decay)
            else:
                grad_decay = decay_gradient(by_x, by_y, last * grad_last, decay)
        return dx, dy, dz, dstate, grad_decay, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *given: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """The mapped dimension joins the batch, the first of every tensor but `sequence`."""
        x, y, z, state, decay, pattern, reverse = given
        *dims, decay_dim, at, _ = in_dims
        size, batch = info.batch_size, x.shape[0 if dims[0] is None else int(dims[0] == 0)]
        refuse_mapped("cu_seqlens", at.sequence)
        operands = zip((x, y, z, state), dims, strict=True)
        rows = [join_batch(operand, dim, size, batch) for operand, dim in operands]
        decay = join_shared(decay, decay_dim, size, batch)
        pattern = pattern._replace(
            query_basis=join_shared(pattern.query_basis, at.query_basis, size, batch),
            key_basis=join_shared(pattern.key_basis, at.key_basis, size, batch),
        )
        found = _Trilinear.apply(*rows, decay, pattern, reverse)
        out, last = (x.unflatten(0, (size, batch)) for x in found)
        return (out, last), (0, 0)


def _rows_of(rows: Tensor, spans: Spans) -> Load:
    pieces = cut(rows, spans)
    return lambda n, into: pieces[n] if into is None else into.copy_(pieces[n])
