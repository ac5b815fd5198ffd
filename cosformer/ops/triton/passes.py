"""Both passes of attention by the kernels of `kernels/sweep.py`."""

import os

import torch
from torch import Tensor

from cosformer.ops.problem import Asked, Given, Grads, Problem, Results, Swept, room_for_outputs
from cosformer.ops.triton.launch import Launch, Pass
from cosformer.ops.triton.prepared import Rows
from cosformer.ops.triton.tiles import MANY_PROGRAMS, Tiles, choose_tiles
from cosformer.runtime import HAS_TRITON

MAX_WIDTH = 256
MAPS = ("relu", "identity")
SMALLEST_SCALE = 2.0**-8
"""Of q in float16: smaller ones, and those above 1, may lead out of its range."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in Python, on the CPU


def why_not(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    """What the kernels need and do not get; None if they can compute the problem."""
    if not HAS_TRITON:
        return "the package triton"
    if not (q.is_cuda or INTERPRETED):
        return f"tensors on a CUDA device, got {q.device.type}"
    if q.dtype == torch.float64:
        return "float32, bfloat16 or float16, got float64"
    if q.dtype == torch.bfloat16 and INTERPRETED:
        return "float32 or float16 under Triton's interpreter, got bfloat16"
    if max(k.shape[3], v.shape[3]) > MAX_WIDTH:
        return f"widths up to {MAX_WIDTH}, got {k.shape[3]} and {v.shape[3]}"
    decays = problem.query_decay is not None or problem.gates is not None
    if decays and q.shape[2] != k.shape[2]:
        return f"as many queries as keys under a decay, got {q.shape[2]} and {k.shape[2]}"
    if decays and problem.query_start:
        return f"query_start=0 under a decay, got {problem.query_start}"
    if q.dtype == torch.float16 and not SMALLEST_SCALE <= problem.scale <= 1:
        return f"a scale of {SMALLEST_SCALE} ... 1 in float16, got {problem.scale}"
    return None


def forward(given: Given) -> Results:
    """Output, row totals, and the last state of every query head if it is to be kept.

    A given state is that of every query head, `[B, H, R, D, V(+1)]`.
    """
    q, k, v, options = given.q, given.k, given.v, given.options
    this, causal = Pass(given), options.causal
    packed = given.constants.bounds is not None
    groups, relu = q.shape[1] // k.shape[1], options.feature_map == "relu"
    # relu and identity let a positive factor through
    scaled = q if options.scale == 1 else q * options.scale
    x, y, z = Rows(scaled, 1, relu), Rows(k, groups, relu), Rows(v, groups)
    out, total = room_for_outputs(q, v, options.rule)
    reads_past = Launch(
        None, y, z, causal=causal, rule=options.rule, eps=options.eps, masked="writer"
    )
    first, last, rows = this.gather(reads_past, _as_segment(given.state))
    new = None
    if last is None:
        last = this.states_of(1, y, z, turned=False, zero=True)
        new = last if causal and not packed else None
    if not causal:
        rows = this.segment(x, z, MANY_PROGRAMS)
    this.launch(
        reads_past._replace(
            x=x, write=causal, rows=rows, out=out, total=total, first=first, last=new
        )
    )
    if causal and not packed and not q.shape[2] and first is not None:
        last = first.clone()
    return Results(out, total, last[:, :, 0].clone() if options.keep_state else None)


def backward(given: Given, results: Results, grads: Grads, asked: Asked) -> Swept:
    """The gradients that are asked for; states and their gradients are those of query heads."""
    q, k, v, options = given.q, given.k, given.v, given.options
    this, causal = Pass(given), options.causal
    packed = given.constants.bounds is not None
    groups, relu = q.shape[1] // k.shape[1], options.feature_map == "relu"
    grad_out = torch.zeros_like(results.out) if grads.out is None else grads.out
    by_row = this.prepare(grad_out, results)
    grad_out = grad_out if options.scale == 1 else grad_out * options.scale
    queries, of_out = Rows(q, 1, relu), Rows(grad_out)
    keys, values = Rows(k, groups, relu), Rows(v, groups)
    gated = "relu" if relu else "identity"
    tiles = choose_tiles(v.shape[3], q.dtype)
    dq = dk = dv = query_dots = key_dots = back = None
    if asked.sweeps_q:
        dq = torch.empty_like(q)
        query_dots = _dots(q, q, tiles) if asked.decay else None
        reads_past = Launch(
            None, keys, values, causal=causal, rule=options.rule, eps=options.eps, masked="writer"
        )
        first, _, rows = this.gather(reads_past, _as_segment(given.state))
        this.launch(
            Launch(
                of_out, values, keys, causal=causal, write=causal, turned=True, first=first,
                out=dq, rows=rows if causal else this.segment(of_out, keys, MANY_PROGRAMS),
                by_row=by_row, scaled="x", column_at="reader", gate=q, gated=gated,
                dots=query_dots, masked="writer",
            )
        )  # fmt: skip
    if not asked.reverse:
        return Swept(dq if asked.q else None, by_query=query_dots)
    end = _as_segment(grads.last)
    reads_future = Launch(
        None, of_out, queries, causal=causal, by_row=by_row, scaled="y", column_at="writer",
        turned=True, reverse=True,
    )  # fmt: skip
    first, grad_first, rows = this.gather(reads_future, end)
    new = None
    if grad_first is None:
        grad_first = this.states_of(1, of_out, queries, turned=True, zero=True)
        new = grad_first if causal and not packed else None
    if not causal:
        rows = this.segment(values, queries, MANY_PROGRAMS)
    if asked.sweeps_k:
        dk = _room(k, q)
        key_dots = _dots(k, q, tiles) if asked.decay else None
        this.launch(
            reads_future._replace(
                x=values, write=causal, rows=rows, first=first, last=new, out=dk, gate=k,
                gated=gated, dots=key_dots, masked="reader",
            )
        )  # fmt: skip
    if asked.v:
        dv = _room(v, q)
        this.launch(
            Launch(
                keys, queries, of_out, causal=causal, write=causal, reverse=True, rows=rows,
                first=first, out=dv, by_row=by_row, scaled="z", masked="reader",
            )
        )  # fmt: skip
    if causal and not packed and not q.shape[2] and end is not None:
        grad_first = end.clone()
    if asked.state:
        back = grad_first[:, :, 0].clone()
    return Swept(
        dq if asked.q else None,
        _per_key_head(dk, k) if asked.k else None,
        _per_key_head(dv, v),
        back,
        _summed(query_dots),
        _summed(key_dots),
    )


def _room(rows: Tensor, q: Tensor) -> Tensor:
    """Memory for the gradient of keys or values by each head of q."""
    shared = q.shape[1] > rows.shape[1]
    dtype = torch.float32 if shared else rows.dtype
    return rows.new_empty(*q.shape[:2], *rows.shape[2:], dtype=dtype)


def _per_key_head(grad: Tensor | None, rows: Tensor) -> Tensor | None:
    """A gradient summed over the heads of q that share a head of k."""
    if grad is None or grad.shape[1] == rows.shape[1]:
        return grad
    return grad.unflatten(1, (rows.shape[1], -1)).sum(2).to(rows.dtype)


def _dots(rows: Tensor, q: Tensor, tiles: Tiles) -> Tensor:
    """Where a launch leaves φ(row)·gradient, a number for each block of columns."""
    blocks = -(-rows.shape[3] // tiles.columns)
    return rows.new_empty(*q.shape[:2], rows.shape[2], blocks, dtype=torch.float32)


def _summed(dots: Tensor | None) -> Tensor | None:
    """Dots summed over the blocks of columns."""
    return dots if dots is None or dots.shape[3] == 1 else dots.sum(-1, keepdim=True)


def _as_segment(state: Tensor | None) -> Tensor | None:
    return None if state is None else state[:, :, None].contiguous()
