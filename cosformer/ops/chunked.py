"""Attention in linear time and memory on any device, in plain torch, with its own backward.

The backward is three sweeps, the last two in one where both are asked for (D divides, total is a
row's sum of weights):

    g_i = dout_i / D_i        δ_i = −(dout_i · out_i) / D_i · dD_i/dtotal_i
    dφ(q) = sweep([g δ], [v 1], φ(k))
    dφ(k) = reverse sweep([v 1], [g δ], φ(q))        dv = reverse sweep(φ(k), φ(q), g)

It keeps q, k, v, out and total, and nothing larger. A sweep's gradients are sweeps, so under
`create_graph` the same lines run on differentiable sweeps, to any order.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops.asked import Asked
from cosformer.ops.features import FEATURE_MAPS
from cosformer.ops.memo import eager, with_basis
from cosformer.ops.normaliser import denominator, slope
from cosformer.ops.operands import Operands
from cosformer.ops.problem import Problem, compute_dtype, full_precision
from cosformer.ops.scratch import Into, nowhere, placed
from cosformer.ops.span import Span, fold, put
from cosformer.ops.sweep import Load, Reader
from cosformer.ops.trilinear import (
    Pattern,
    Result,
    decay_gradient,
    fold_vmapped,
    recorded,
    run,
    trilinear,
)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, T, V]`; the state `[B, H, R, D, V(+1)]` after the keys if one came in."""
    return _any_lengths(q, k, v, problem, state, kernels=False)


def fused(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same by Triton kernels, forward and backward; derivatives beyond go the torch way."""
    from cosformer.ops.fused import maps

    if problem.feature_map not in maps(q, k, v, problem):
        phi = FEATURE_MAPS[problem.feature_map].forward
        hidden = None if problem.key_mask is None else ~problem.key_mask[:, None, :, None]
        if hidden is not None:  # the slope of φ at NaN would be NaN
            k = k.masked_fill(hidden, 0)
        q, k = phi(q, None), phi(k, None)
        problem = problem._replace(feature_map="identity")
    return _any_lengths(q, k, v, problem, state, kernels=True)


def _any_lengths(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, state: Tensor | None, *, kernels: bool
) -> tuple[Tensor, Tensor | None]:
    if not problem.causal or (problem.query_start == 0 and q.shape[2] == k.shape[2]):
        return _attend(q, k, v, problem, state, kernels=kernels, wanted=state is not None)
    return _attend_unequal(q, k, v, problem, kernels=kernels)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    state: Tensor | None,
    *,
    kernels: bool,
    wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """`wanted`: whether anybody asks for the last state, which kernels need not write down."""
    if problem.query_basis is None or problem.key_basis is None:
        problem = with_basis(problem, compute_dtype(q.dtype))
    # In plain eager mode past the binding of arguments and functorch: 40 µs.
    apply = super(Function, _Attention).apply if eager(q, k, v) else _Attention.apply
    out, _, state, *_ = apply(
        q,
        k,
        v,
        problem.query_decay if q.shape[2] else problem.key_decay,
        state,
        problem.key_mask,
        problem.query_basis,
        problem.key_basis,
        problem.sequence,
        problem.bounds,
        problem.causal,
        problem.feature_map,
        problem.rule,
        problem.eps,
        kernels,
        wanted,
    )
    return out, state


def _attend_unequal(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, kernels: bool
) -> tuple[Tensor, Tensor | None]:
    """Causal with T ≠ S: earlier keys meet the queries as a state, and later queries the keys.

    keys       ┌── before ──┬── shared ──┐ (later keys are never seen)
    queries    (no key yet) ├── shared ──┼── after ──┐
    """
    start, queries, keys = problem.query_start, q.shape[2], k.shape[2]
    weights_per_head = problem.theta.shape[0] > 1 or problem.query_decay is not None
    if q.shape[1] > k.shape[1] and weights_per_head:  # heads of a group cannot share the state
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    pieces = []
    nothing = _clip(-start, queries)  # queries that stand before the first key
    before = _clip(start, keys)
    shared_stop = before + _clip(start + queries - before, keys - before)
    if nothing:
        pieces.append(q.new_zeros(*q.shape[:2], nothing, v.shape[-1]))
    here = {"kernels": kernels}
    _, state = _piece(q, k, v, problem, slice(0, 0), slice(0, before), None, causal=False, **here)
    shared = slice(nothing, nothing + shared_stop - before)
    own = slice(before, shared_stop)
    out, state = _piece(q, k, v, problem, shared, own, state, causal=True, **here)
    pieces.append(out)
    if shared.stop < queries:
        after = slice(shared.stop, queries)
        no_key = slice(keys, keys)
        out, _ = _piece(q, k, v, problem, after, no_key, state, causal=False, **here)
        pieces.append(out)
    return torch.cat(pieces, 2), state


def _clip(count: int, limit: int) -> int:
    """Between 0 and the limit, by branches: a tracer reasons about them better than about min."""
    if count <= 0:
        return 0
    return count if count <= limit else limit


def _piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    queries: slice,
    keys: slice,
    state: Tensor | None,
    *,
    causal: bool,
    kernels: bool,
) -> tuple[Tensor, Tensor | None]:
    """A stretch of queries and keys, with L counted from the last key before it."""
    query_decay, key_decay = problem.query_decay, problem.key_decay
    if query_decay is not None and key_decay is not None:
        done = key_decay[..., keys.start - 1, None] if keys.start else 0.0
        query_decay, key_decay = query_decay[..., queries] - done, key_decay[..., keys] - done
    part = problem._replace(
        causal=causal,
        query_start=0,
        query_position=problem.query_position[:, queries],
        key_position=problem.key_position[:, keys],
        query_decay=query_decay,
        key_decay=key_decay,
        query_basis=None,
        key_basis=None,
        key_mask=None if problem.key_mask is None else problem.key_mask[:, keys],
    )
    rows = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
    return _attend(*rows, part, state, kernels=kernels, wanted=True)


class _Attention(Function):
    """(q, k, v, decay, state) -> (out, total, state), all within one sweep.

    Kernels may add a fourth result that they keep for their backward pass.
    """

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        state: Tensor | None,
        key_mask: Tensor | None,
        query_basis: Tensor,
        key_basis: Tensor,
        sequence: Tensor | None,
        bounds: Tensor | None,
        causal: bool,
        feature_map: str,
        rule: str,
        eps: float,
        kernels: bool,
        wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        rows = Operands(q, k, v, key_mask, feature_map, rule)
        if kernels:
            from cosformer.ops import by_kernels

            arrays = (decay, state, key_mask, query_basis, key_basis, bounds)
            options = (causal, feature_map, rule, eps)
            return by_kernels.forward(rows, q, k, v, *arrays, *options, wanted=wanted)
        pattern = Pattern(query_basis, key_basis, decay, sequence, causal)
        same_width = q.shape[-1] == v.shape[-1]
        out = torch.empty_like(q) if same_width else q.new_empty(*q.shape[:3], v.shape[-1])
        total = q.new_empty(q.shape[:3], dtype=rows.dtype)[:, :, : None if rule != "none" else 0]

        in_place = out.dtype == rows.dtype and not torch.compiler.is_compiling()

        def store(span: Span, sums: Tensor) -> None:
            if rule != "none":
                row_total = sums[..., -1:]
                put(total[..., None], span, row_total)
                divisor = denominator(row_total, rule, eps)
                if in_place:
                    torch.div(sums[..., :-1], divisor, out=fold(out, span))
                    return
                sums = sums[..., :-1] / divisor
            put(out, span, sums)

        with full_precision(q):
            first = rows.spread(state, query_basis.shape[-1])
            last = run(pattern, rows.k, rows.v, first, Reader(rows.q, store))
            last = last if last is not first and k.shape[2] else last.clone()
        return out, total, last[:, :: rows.groups]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.causal, ctx.feature_map, ctx.rule, ctx.eps, ctx.kernels, _ = inputs
        out, total, last, *kept = output
        # The last state is kept only beside a decay, whose gradient asks for it.
        beside = last if tensors[3] is not None else None
        ctx.save_for_backward(*tensors, out, total, beside, *kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_total: Tensor | None,
        grad_last: Tensor | None,
        *others: None,
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q, k, v, decay, state, key_mask, query_basis, key_basis, sequence, _, *outputs = saved
        out, total, last, *_ = outputs
        rows = Operands(q, k, v, key_mask, ctx.feature_map, ctx.rule)
        if ctx.kernels and not recorded() and grad_total is None:
            from cosformer.ops import by_kernels

            return *by_kernels.backward(ctx, saved, rows, grad_out, grad_last), *[None] * 11
        pattern = Pattern(query_basis, key_basis, decay, sequence, ctx.causal)
        asked = Asked(*ctx.needs_input_grad[:5])
        slopes = FEATURE_MAPS[ctx.feature_map].backward

        def grads(span: Span, into: Into) -> Tensor:
            """[g δ]"""
            outputs = fold(out, span)
            if grad_out is None:
                grad = torch.zeros_like(outputs, dtype=rows.dtype)
            else:
                grad = fold(grad_out, span).to(rows.dtype)
            if ctx.rule == "none":
                return placed(grad, into)
            row_total = fold(total[..., None], span)
            grad = grad / denominator(row_total, ctx.rule, ctx.eps)
            delta = (grad * outputs).sum(-1, keepdim=True)
            delta = -delta * slope(row_total, ctx.rule, ctx.eps)
            if grad_total is not None:
                delta = delta + fold(grad_total[..., None], span)
            return placed(grad, into, column=delta)

        def finish_q(span: Span, grad: Tensor) -> tuple[Tensor, ...]:
            dq = slopes(grad, fold(q, span).to(rows.dtype))
            return (dq, dots(grad, rows.q, span)) if asked.decay else (dq,)

        def finish_k(span: Span, grad: Tensor) -> tuple[Tensor, ...]:
            dk = slopes(rows.sum_groups(grad), fold(k, span).to(rows.dtype))
            dk = rows.hide(dk, span)
            return (dk, dots(grad, rows.k, span)) if asked.decay else (dk,)

        def finish_v(span: Span, grad: Tensor) -> tuple[Tensor, ...]:
            return (rows.hide(rows.sum_groups(grad[..., : v.shape[-1]]), span),)

        def dots(grad: Tensor, load: Load, span: Span) -> Tensor:
            return (grad * load(span, nowhere)).sum(-1, keepdim=True)

        def like(x: Tensor) -> tuple[Tensor, ...]:
            shape = (*q.shape[:2], x.shape[2], 1)
            dots = (q.new_empty(shape, dtype=rows.dtype),) if asked.decay else ()
            return torch.empty_like(x), *dots

        with full_precision(q):
            first = rows.spread(state, query_basis.shape[-1])
            grad_state = rows.spread_last(grad_last, first)
            of_q: tuple[Tensor, ...] = ()  # a gradient, and dots
            of_k = of_v = of_q
            grad_decay = back = None
            if asked.sweeps_q:
                by_q = Result(grads, finish_q, like(q))
                of_q, _ = trilinear(pattern, rows.v, rows.k, first.mT, by_q)
            by_k = Result(rows.v, finish_k, like(k)) if asked.sweeps_k else None
            if asked.v or asked.state:
                by_v = Result(rows.k, finish_v, like(v)[:1])
                both, grad_first = trilinear(
                    pattern, rows.q, grads, grad_state, by_v, mirror=by_k, reverse=True
                )
                of_v, of_k = both[:1], both[1:]
                back = rows.sum_groups(grad_first).to(state.dtype) if asked.state else None
            elif by_k is not None:
                of_k, _ = trilinear(pattern, grads, rows.q, grad_state.mT, by_k, reverse=True)
            if asked.decay:
                at_end = None if grad_last is None else grad_state * rows.spread(last, 0)
                grad_decay = decay_gradient(of_q[1], of_k[1], at_end, decay)
        pairs = zip((of_q, of_k, of_v), (q, k, v), strict=True)
        found = [made[0].to(x.dtype) if made else None for made, x in pairs]
        return *asked.only(found), grad_decay, back, *[None] * 11

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        def apply(*args: Any) -> tuple[Tensor, ...]:
            return _Attention.apply(*args[:-1], True)[:3]  # all results are tensors

        return fold_vmapped(apply, info.batch_size, in_dims, args, rows=(0, 1, 2, 4))


# Each call of apply reads the signature: from here in a microsecond, by inspection in a hundred.
_Attention.forward.__signature__ = inspect.signature(_Attention.forward)  # type: ignore[attr-defined]
