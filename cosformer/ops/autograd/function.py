"""Attention in linear time and memory on any device, with its own backward."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops.chunked import passes as by_torch
from cosformer.ops.chunked.operands import Operands
from cosformer.ops.chunked.trilinear import Pattern, fold_vmapped
from cosformer.ops.problem.features import FEATURE_MAPS
from cosformer.ops.problem.memo import with_basis
from cosformer.ops.problem.problem import Problem
from cosformer.runtime import compute_dtype, eager, recorded


def chunked(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, T, V]`; the state `[B, H, R, D, V(+1)]` after the keys if one came in."""
    return _any_lengths(q, k, v, problem, state, kernels=False)


def fused(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same by Triton kernels, forward and backward; derivatives beyond go the torch way."""
    from cosformer.ops.triton.operators import maps

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
        problem.scale,
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
        scale: float,
        kernels: bool,
        wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        rows = Operands(q, k, v, key_mask, feature_map, rule)
        if kernels:
            from cosformer.ops.triton import by_kernels

            arrays = (decay, state, key_mask, query_basis, key_basis, bounds)
            options = (causal, feature_map, rule, eps, scale)
            return by_kernels.forward(rows, q, k, v, *arrays, *options, wanted=wanted)
        pattern = Pattern(query_basis, key_basis, decay, sequence, causal)
        return by_torch.forward(rows, q, v, state, pattern, rule, eps, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, causal, feature_map, rule, eps, scale, kernels, _ = inputs
        ctx.causal, ctx.feature_map, ctx.kernels = causal, feature_map, kernels
        ctx.rule, ctx.eps, ctx.scale = rule, eps, scale
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
        q, k, v, _, _, key_mask, *_ = saved
        rows = Operands(q, k, v, key_mask, ctx.feature_map, ctx.rule)
        if ctx.kernels and not recorded() and grad_total is None:
            from cosformer.ops.triton import by_kernels

            found = by_kernels.backward(ctx, saved, rows, grad_out, grad_last)
        else:
            found = by_torch.backward(ctx, saved, rows, grad_out, grad_total, grad_last)
        return *found, *[None] * 12

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        def apply(*args: Any) -> tuple[Tensor, ...]:
            return _Attention.apply(*args[:-1], True)[:3]  # all results are tensors

        return fold_vmapped(apply, info.batch_size, in_dims, args, rows=(0, 1, 2, 4))


# Each call of apply reads the signature: from here in a microsecond, by inspection in a hundred.
_Attention.forward.__signature__ = inspect.signature(_Attention.forward)  # type: ignore[attr-defined]
