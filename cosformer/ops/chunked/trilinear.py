"""out_i = Σ_j w(i, j) (x_i·y_j) z_j with a state in and out: once, in reverse, and differentiably.

The map is linear in each of x, y, z and the state, so its gradients are the same map with the
roles changed:   dx = (dout, z, y)     dy = reversed (z, dout, x)     dz = reversed (y, x, dout).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops.chunked.chunks import Span, fold, plan, put
from cosformer.ops.chunked.sweep import Load, Reader, Weight, gather, scatter, sweep
from cosformer.ops.chunked.workspace import nowhere, placed
from cosformer.runtime import recorded


class Pattern(NamedTuple):
    """w(i, j), and which pairs meet: j ≤ i when causal, else all (of one packed sequence)."""

    query_basis: Tensor  # [b, h, T, R]
    key_basis: Tensor  # [b, h, S, R]
    decay: Tensor | None  # L [b, h, T]; without `causal` either T or S must be 0
    sequence: Tensor | None  # [T]
    causal: bool


class Result(NamedTuple):
    """Rows to read with, what to make of the sums they get, and the buffers that takes."""

    load: Load
    finish: Callable[[Span, Tensor], tuple[Tensor, ...]]  # of [B, H, n, C, width]
    buffers: tuple[Tensor, ...]

    def reader(self) -> Reader:
        def store(span: Span, sums: Tensor) -> None:
            for buffer, rows in zip(self.buffers, self.finish(span, sums), strict=True):
                put(buffer, span, rows)

        return Reader(self.load, store)


def trilinear(
    pattern: Pattern,
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
    at work, under which a buffer may lack the mapped dimension: then all rows are one span.
    """
    if not recorded():
        other = mirror.reader() if mirror else None
        state = run(pattern, y, z, state, x.reader(), other, reverse=reverse)
        return x.buffers + (mirror.buffers if mirror else ()), state
    queries, keys = (_whole(basis.shape[2]) for basis in pattern[:2])
    if reverse:
        queries, keys = keys, queries
    constants = (pattern.decay, *pattern[:2], *pattern[3:], reverse)
    columns, values = (load(keys, nowhere).flatten(2, 3) for load in (y, z))

    def read(by: Result, y: Tensor, z: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        rows = by.load(queries, nowhere).flatten(2, 3)
        sums, last = _Trilinear.apply(rows, y, z, state, *constants)
        return tuple(rows.flatten(2, 3) for rows in by.finish(queries, sums[:, :, None])), last

    results, last = read(x, columns, values, state)
    if mirror is not None:
        results += read(mirror, values, columns, state.mT)[0]
    return results, last


def run(
    pattern: Pattern,
    y: Load,
    z: Load,
    state: Tensor,
    x: Reader,
    mirror: Reader | None = None,
    *,
    reverse: bool = False,
) -> Tensor:
    """Serve the readers span by span; the last state, `[B, H, R, y, z]` like the first."""
    query_basis, key_basis, decay, sequence, causal = pattern
    flat = state.flatten(2, 3)
    heads = state.shape[0] * state.shape[1]
    device = state.device.type
    queries = plan(query_basis.shape[2], heads, device)
    if causal or sequence is not None:
        weight = Weight(query_basis, key_basis, decay, sequence)
        if causal:
            last = sweep(y, z, weight, flat, queries, x=x, mirror=mirror, reverse=reverse)
            return last.unflatten(2, state.shape[2:4])
        _both_ways(y, z, weight, flat, queries, x, mirror)
        return state
    keys = plan(key_basis.shape[2], heads, device)
    kept: float | Tensor = 1.0  # how much of a state is left after the keys
    if decay is not None and keys:
        end = decay[..., -1:]
        key_basis = key_basis * (end - decay).exp()[..., None].to(key_basis.dtype)
        kept = end.exp()[..., None].to(flat.dtype)
    elif decay is not None:
        query_basis = query_basis * decay.exp()[..., None].to(query_basis.dtype)
    if reverse:
        read, readers = key_basis, keys
        flat = gather(y, z, query_basis, flat, queries)
        last = flat * kept
    else:
        read, readers = query_basis, queries
        flat = last = gather(y, z, key_basis, flat * kept, keys)
    scatter(x, read, flat, readers)
    if mirror is not None:
        scatter(mirror, read, flat, readers, turned=True)
    return last.unflatten(2, state.shape[2:4])


def _both_ways(
    y: Load,
    z: Load,
    weight: Weight,
    state: Tensor,
    spans: list[Span],
    x: Reader,
    mirror: Reader | None,
) -> None:
    """All pairs of each packed sequence: j ≤ i by one sweep, j > i by another.

    Queries and keys stand at the same positions, so w(i, j) = w(j, i) and either direction serves.
    """

    def halves(reader: Reader) -> tuple[Reader, Reader]:
        past: dict[int, Tensor] = {}

        def keep(span: Span, sums: Tensor) -> None:
            past[span.start] = sums.clone()

        def add(span: Span, sums: Tensor) -> None:
            reader.store(span, past.pop(span.start) + sums)

        return Reader(reader.load, keep), Reader(reader.load, add)

    first, second = halves(x)
    other_first, other_second = halves(mirror) if mirror else (None, None)
    sweep(y, z, weight, state, spans, x=first, mirror=other_first)
    sweep(y, z, weight, state, spans, x=second, mirror=other_second, reverse=True, strict=True)


class _Trilinear(Function):
    """The map on whole tensors, differentiable to any order."""

    @staticmethod
    def forward(
        x: Tensor,
        y: Tensor,
        z: Tensor,
        state: Tensor,
        decay: Tensor | None,
        query_basis: Tensor,
        key_basis: Tensor,
        sequence: Tensor | None,
        causal: bool,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        pattern = Pattern(query_basis, key_basis, decay, sequence, causal)
        out = x.new_empty(*x.shape[:3], z.shape[-1])

        reader = Reader(_rows_of(x), partial(put, out))
        last = run(pattern, _rows_of(y), _rows_of(z), state, reader, reverse=reverse)
        return out, last.clone() if last is state else last

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.causal, ctx.reverse = inputs
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        x, y, z, state, decay, query_basis, key_basis, sequence, last = ctx.saved_tensors
        pattern = (decay, query_basis, key_basis, sequence, ctx.causal)
        there, back = ctx.reverse, not ctx.reverse
        dx, _ = _Trilinear.apply(grad_out, z, y, state.mT, *pattern, there)
        dy, _ = _Trilinear.apply(z, grad_out, x, grad_last.mT, *pattern, back)
        dz, dstate = _Trilinear.apply(y, x, grad_out, grad_last, *pattern, back)
        grad_decay = None
        if decay is not None:
            by_x, by_y = (x * dx).sum(-1, keepdim=True), (y * dy).sum(-1, keepdim=True)
            ends = (state, dstate) if ctx.reverse else (last, grad_last)
            grad_decay = decay_gradient(
                *((by_y, by_x) if ctx.reverse else (by_x, by_y)), (ends[0] * ends[1]), decay
            )
        return dx, dy, dz, dstate, grad_decay, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return fold_vmapped(_Trilinear.apply, info.batch_size, in_dims, args, rows=(0, 1, 2, 3))


def decay_gradient(
    by_query: Tensor,
    by_key: Tensor,
    at_end: Tensor | None,
    decay: Tensor,
    at_start: Tensor | None = None,
) -> Tensor:
    """dL. L_i enters through row i of the weights, −L_j through column j, L_end through the state.

    Weights are linear in features, so a row's share is x_i·dx_i and a column's is y_j·dy_j, which
    `by_query` and `by_key` hold, `[B, H, T, 1]`.

    Args:
        at_start: what the sum over all tokens must be, `[B, H]`, where products are rounded to
            16 bits; in float32 and above there is nothing to gain.
    """
    by_query, by_key = by_query[..., 0], by_key[..., 0]
    if not by_key.shape[2]:
        return by_query.to(decay.dtype).sum_to_size(decay.shape)
    grad = by_query - by_key if by_query.shape[2] else -by_key
    if at_end is not None:
        last = grad[..., -1:] + at_end.sum((-3, -2, -1))[..., None]
        grad = torch.cat([grad[..., :-1], last], -1)
    if at_start is not None:
        grad = _balanced(grad, by_query, by_key, at_start)
    return grad.to(decay.dtype).sum_to_size(decay.shape)


def _balanced(grad: Tensor, by_query: Tensor, by_key: Tensor, total: Tensor) -> Tensor:
    """`grad` with the sum `total` over tokens, the rest taken from each by its share of variance.

    A gate's gradient sums dL from its token on, and with it all roundings of later tokens. But a
    shift of every L changes only what a state at the start weighs, so the sum over all is known.
    """
    size = torch.hypot(by_query, by_key)
    largest = size.amax(-1, keepdim=True).clamp(min=torch.finfo(grad.dtype).tiny)
    variance = (size / largest).square()
    excess = (grad.sum(-1) - total) / variance.sum(-1).clamp(min=1)  # the largest of them is 1
    return torch.addcmul(grad, variance, excess[..., None], value=-1)


def fold_vmapped(
    apply: Callable[..., Any],
    size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
    *,
    rows: tuple[int, ...],
) -> tuple[Any, Any]:
    """A vmapped dimension joins the batch, the first of every tensor but `sequence` `[T]`.

    Arguments at the places `rows` must have the whole batch; the others may broadcast from 1.
    """
    batch = args[0].shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]
    folded = []
    for place, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(arg, Tensor) and dim is not None:
            if arg.dim() == 2:
                raise ValueError("cu_seqlens cannot be mapped over by vmap")
            arg = arg.movedim(dim, 0)
            arg = arg.expand(-1, batch, *arg.shape[2:]).flatten(0, 1)
        elif isinstance(arg, Tensor) and arg.dim() > 1 and (place in rows or arg.shape[0] > 1):
            arg = arg.expand(size, *arg.shape).flatten(0, 1)
        folded.append(arg)
    outputs = tuple(out.unflatten(0, (size, batch)) for out in apply(*folded))
    return outputs, (0,) * len(outputs)


def _rows_of(rows: Tensor) -> Load:
    return lambda span, into: placed(fold(rows, span), into)


def _whole(length: int) -> Span:
    return Span(0, length, 1, length)
