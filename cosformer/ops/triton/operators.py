"""Attention by the kernels of `triton/kernels/sweep.py`, as two operators of torch.

`cosformer::fused_forward` and `cosformer::fused_backward`: `chunked.py` calls them inside its
autograd function, which keeps its own backward for higher derivatives.
"""

import os
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.autograd.asked import Asked
from cosformer.ops.hopper import passes as hopper
from cosformer.ops.problem.problem import WEIGHTS, Problem, outputs
from cosformer.ops.triton.launch import Pass
from cosformer.ops.triton.prepared import Rows
from cosformer.ops.triton.tiles import MANY_PROGRAMS, Tiles, choose_tiles
from cosformer.runtime import eager

MAX_WIDTH = 256
TRITON_MAPS = ("relu", "identity")
SMALLEST_SCALE = 2.0**-8
"""Of q in float16: smaller ones, and those above 1, may lead out of its range."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in Python, on the CPU


def unsupported(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    """What the kernels need and do not get; None if they can compute the problem."""
    if not (q.is_cuda or INTERPRETED):
        return f"tensors on a CUDA device, got {q.device.type}"
    if q.dtype == torch.float64:
        return "float32, bfloat16 or float16, got float64"
    if q.dtype == torch.bfloat16 and INTERPRETED:
        return "float32 or float16 under Triton's interpreter, got bfloat16"
    if max(k.shape[3], v.shape[3]) > MAX_WIDTH:
        return f"widths up to {MAX_WIDTH}, got {k.shape[3]} and {v.shape[3]}"
    if problem.query_decay is not None and q.shape[2] != k.shape[2]:
        return f"as many queries as keys under a decay, got {q.shape[2]} and {k.shape[2]}"
    if problem.query_decay is not None and problem.query_start:
        return f"query_start=0 under a decay, got {problem.query_start}"
    if q.dtype == torch.float16 and not SMALLEST_SCALE <= problem.scale <= 1:
        return f"a scale of {SMALLEST_SCALE} ... 1 in float16, got {problem.scale}"
    return None


def maps(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Container[str]:
    """The feature maps that the kernels for this problem know."""
    whole = not problem.causal or (problem.query_start == 0 and q.shape[2] == k.shape[2])
    if problem.feature_map in TRITON_MAPS or not (whole and eager(q, k, v)):
        return TRITON_MAPS
    states = WEIGHTS[problem.weight]
    about = (problem.query_decay, problem.bounds, states, problem.causal)
    reason = hopper.unsupported(q, k, v, *about)
    return TRITON_MAPS if reason else hopper.MAPS


def forward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    key_mask: Tensor | None,
    query_basis: Tensor,
    key_basis: Tensor,
    bounds: Tensor | None,
    causal: bool,
    feature_map: str,
    rule: str,
    eps: float,
    scale: float,
    wanted: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Output `[B, H, T, V]`, row totals `[B, H, T]`, state `[B, H, R, D, V(+1)]` if `wanted`.

    And, or None, what is worth keeping for `backward_pass`, which can do without it.
    """
    if hopper.unsupported(q, k, v, decay, bounds, query_basis.shape[3], causal) is None:
        return hopper.forward(
            q, k, v, decay, state, key_mask, query_basis, key_basis,
            causal, feature_map, rule, eps, scale, wanted,
        )  # fmt: skip
    this = Pass(q, decay, key_mask, query_basis, key_basis, bounds)
    groups, relu, sums = q.shape[1] // k.shape[1], feature_map == "relu", rule != "none"
    scaled = q if scale == 1 else q * scale  # relu and identity let a positive factor through
    x, y, z = Rows(scaled, 1, relu), Rows(k, groups, relu), Rows(v, groups)
    out, total = outputs(q, v, rule)
    options: dict[str, Any] = {"rule": rule, "eps": eps, "masked": "writer"}
    first, last, rows = this.gather(y, z, _as_segment(state), causal=causal, sums=sums, **options)
    new = None
    if last is None:
        last = this.states_of(1, y, z, turned=False, sums=sums, zero=True)
        new = last if causal and bounds is None else None
    if not causal:
        rows = this.segment(x, z, MANY_PROGRAMS)
    this.launch(
        x, y, z, causal=causal, write=causal, rows=rows, out=out, total=total, first=first,
        last=new, **options,
    )  # fmt: skip
    if causal and bounds is None and not q.shape[2] and first is not None:
        last = first.clone()
    return out, total, last[:, :, 0].clone() if wanted else None, None


def backward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    key_mask: Tensor | None,
    query_basis: Tensor,
    key_basis: Tensor,
    bounds: Tensor | None,
    out: Tensor,
    total: Tensor,
    grad_out: Tensor,
    grad_last: Tensor | None,
    causal: bool,
    feature_map: str,
    rule: str,
    eps: float,
    scale: float,
    asked: Asked,
    kept: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the state, None for those that are not asked for.

    And φ(q)·dφ(q) and φ(k)·dφ(k), of which the decay's gradient is made up, if that is.
    """
    if hopper.unsupported(q, k, v, decay, bounds, query_basis.shape[3], causal) is None:
        found = hopper.backward(
            q, k, v, decay, state, key_mask, query_basis, key_basis, out, total, grad_out,
            grad_last, causal, feature_map, rule, eps, scale, asked, kept,
        )  # fmt: skip
        *_, back, by_query, by_key = found
        return *asked.only(found), back, _summed(by_query), _summed(by_key)
    this = Pass(q, decay, key_mask, query_basis, key_basis, bounds)
    groups, relu, sums = q.shape[1] // k.shape[1], feature_map == "relu", rule != "none"
    inverse, column, deltas = this.prepare(grad_out, out, total, rule, eps)
    rows_of: dict[str, Any] = {"scale": inverse, "column": column, "deltas": deltas}
    grad_out = grad_out if scale == 1 else grad_out * scale
    queries, grads = Rows(q, 1, relu), Rows(grad_out)
    keys, values = Rows(k, groups, relu), Rows(v, groups)
    gated = "relu" if relu else "identity"
    tiles = choose_tiles(v.shape[3], q.dtype)
    dq = query_dots = key_dots = None
    if asked.sweeps_q:
        dq = torch.empty_like(q)
        query_dots = _dots(q, q, tiles) if asked.decay else None
        first, _, rows = this.gather(
            keys, values, _as_segment(state), causal=causal, sums=sums,
            rule=rule, masked="writer", eps=eps,
        )  # fmt: skip
        this.launch(
            grads, values, keys, causal=causal, write=causal, turned=True, first=first, out=dq,
            rows=rows if causal else this.segment(grads, keys, MANY_PROGRAMS),
            scaled="x", column_at="reader", gate=q, gated=gated, dots=query_dots,
            masked="writer", **rows_of,
        )  # fmt: skip
    if not asked.reverse:
        return dq, None, None, None, None, None

    turned: dict[str, Any] = {**rows_of, "turned": True, "reverse": True}
    end = _as_segment(grad_last)
    first, grad_first, rows = this.gather(
        grads, queries, end, causal=causal, sums=sums, scaled="y", column_at="writer", **turned
    )
    new = None
    if grad_first is None:
        grad_first = this.states_of(1, grads, queries, turned=True, sums=sums, zero=True)
        new = grad_first if causal and bounds is None else None
    if not causal:
        rows = this.segment(values, queries, MANY_PROGRAMS)
    dk = dv = None
    if asked.sweeps_k:
        dk = _room(k, q)
        key_dots = _dots(k, q, tiles) if asked.decay else None
        this.launch(
            values, grads, queries, causal=causal, write=causal, rows=rows, first=first, last=new,
            out=dk, scaled="y", column_at="writer", gate=k, gated=gated, dots=key_dots,
            masked="reader", **turned,
        )  # fmt: skip
    if asked.v:
        dv = _room(v, q)
        this.launch(
            keys, queries, grads, causal=causal, write=causal, reverse=True, rows=rows,
            first=first, out=dv, scale=inverse, scaled="z", masked="reader",
        )  # fmt: skip
    if causal and bounds is None and not q.shape[2] and end is not None:
        grad_first = end.clone()
    back = grad_first[:, :, 0].clone() if asked.state else None
    found = (dq, _per_key_head(dk, k), _per_key_head(dv, v))
    return *asked.only(found), back, _summed(query_dots), _summed(key_dots)


ARRAYS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? state, Tensor? key_mask, \
Tensor query_basis, Tensor key_basis, Tensor? bounds"
OPTIONS = "bool causal, str feature_map, str rule, float eps, float scale"
fused_forward = torch.library.custom_op(
    "cosformer::fused_forward",
    lambda *given: _tensors(given[0], forward_pass(*given)[:3]),
    mutates_args=(),
    schema=f"({ARRAYS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
fused_backward = torch.library.custom_op(
    "cosformer::fused_backward",
    lambda *given: _tensors(given[0], backward_pass(*[*given[:-1], Asked(*given[-1])])),
    mutates_args=(),
    schema=f"({ARRAYS}, Tensor out, Tensor total, Tensor grad_out, Tensor? grad_last, {OPTIONS}, "
    "bool[] asked) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _tensors(like: Tensor, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An operator returns tensors: empty ones for None."""
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in found)


def _state_like(q: Tensor, v: Tensor, basis: Tensor, rule: str) -> Tensor:
    columns = v.shape[3] + (rule != "none")
    shape = (*q.shape[:2], basis.shape[3], q.shape[3], columns)
    return q.new_empty(shape, dtype=torch.float32)


@fused_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Any,
    state: Any,
    key_mask: Any,
    query_basis: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *_, rule, _eps, _scale = others
    return *outputs(q, v, rule), _state_like(q, v, query_basis, rule)


@fused_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Any,
    state: Any,
    key_mask: Any,
    query_basis: Tensor,
    *others: Any,
) -> tuple[Tensor, ...]:
    *_, rule, _eps, _scale, given = others
    asked = Asked(*given)
    found = asked.only((torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)))
    dots = (
        q.new_empty(*q.shape[:2], x.shape[2], 1, dtype=torch.float32) if asked.decay else None
        for x in (q, k)
    )
    back = _state_like(q, v, query_basis, rule) if asked.state else None
    return _tensors(q, (*found, back, *dots))


def _room(rows: Tensor, q: Tensor) -> Tensor:
    """For the gradient of keys or values by each head of q."""
    shared = q.shape[1] > rows.shape[1]
    dtype = torch.float32 if shared else rows.dtype
    return rows.new_empty(*q.shape[:2], *rows.shape[2:], dtype=dtype)


def _per_key_head(grad: Tensor | None, rows: Tensor) -> Tensor | None:
    """Summed over the heads of q that share one."""
    if grad is None or grad.shape[1] == rows.shape[1]:
        return grad
    return grad.unflatten(1, (rows.shape[1], -1)).sum(2).to(rows.dtype)


def _dots(rows: Tensor, q: Tensor, tiles: Tiles) -> Tensor:
    """Where a launch leaves φ(row)·gradient, a number for each block of columns."""
    blocks = -(-rows.shape[3] // tiles.columns)
    return rows.new_empty(*q.shape[:2], rows.shape[2], blocks, dtype=torch.float32)


def _summed(dots: Tensor | None) -> Tensor | None:
    """Over the blocks of columns."""
    return dots if dots is None or dots.shape[3] == 1 else dots.sum(-1, keepdim=True)


def _as_segment(state: Tensor | None) -> Tensor | None:
    return None if state is None else state[:, :, None].contiguous()
