"""Both passes of attention in plain torch, as the autograd function in `chunked.py` calls them.

The backward is three sweeps, the last two in one where both are asked for (D divides, total is a
row's sum of weights):

    g_i = dout_i / D_i        δ_i = −(dout_i · out_i) / D_i · dD_i/dtotal_i
    dφ(q) = sweep([g δ], [v 1], φ(k))
    dφ(k) = reverse sweep([v 1], [g δ], φ(q))        dv = reverse sweep(φ(k), φ(q), g)

It keeps q, k, v, out and total, and nothing larger. A sweep's gradients are sweeps, so under
`create_graph` the same lines run on differentiable sweeps, to any order.
"""

from typing import Any

import torch
from torch import Tensor

from cosformer.ops.autograd.asked import Asked
from cosformer.ops.chunked.chunks import Span, fold, put
from cosformer.ops.chunked.operands import Operands
from cosformer.ops.chunked.sweep import Load, Reader
from cosformer.ops.chunked.trilinear import Pattern, Result, decay_gradient, run, trilinear
from cosformer.ops.chunked.workspace import Into, nowhere, placed
from cosformer.ops.problem.features import FEATURE_MAPS
from cosformer.ops.problem.normaliser import denominator, slope
from cosformer.runtime import full_precision


def forward(
    rows: Operands,
    q: Tensor,
    v: Tensor,
    state: Tensor | None,
    pattern: Pattern,
    rule: str,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, row totals and the last state."""
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
        elif scale != 1:
            sums = sums * scale
        put(out, span, sums)

    with full_precision(q):
        first = rows.spread(state, pattern.query_basis.shape[-1])
        last = run(pattern, rows.k, rows.v, first, Reader(rows.q, store))
        last = last if last is not first and v.shape[2] else last.clone()
    return out, total, last[:, :: rows.groups]


def backward(
    ctx: Any,
    saved: tuple[Any, ...],
    rows: Operands,
    grad_out: Tensor | None,
    grad_total: Tensor | None,
    grad_last: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, the decay and the state, None for those that are not asked for."""
    q, k, v, decay, state, _, query_basis, key_basis, sequence, _, _, _, last, *_ = saved
    pattern = Pattern(query_basis, key_basis, decay, sequence, ctx.causal)
    asked = Asked(*ctx.needs_input_grad[:5])
    by = _Gradients(ctx, saved, rows, asked, grad_out, grad_total)
    with full_precision(q):
        first = rows.spread(state, query_basis.shape[-1])
        grad_state = rows.spread_last(grad_last, first)
        of_q: tuple[Tensor, ...] = ()  # a gradient, and dots
        of_k = of_v = of_q
        grad_decay = back = None
        if asked.sweeps_q:
            by_q = Result(by.rows, by.finish_q, by.room(q))
            of_q, _ = trilinear(pattern, rows.v, rows.k, first.mT, by_q)
        by_k = None
        if asked.k or asked.decay:  # the state's gradient is at the end of dv's sweep
            by_k = Result(rows.v, by.finish_k, by.room(k))
        if asked.v or asked.state:
            by_v = Result(rows.k, by.finish_v, by.room(v)[:1])
            both, grad_first = trilinear(
                pattern, rows.q, by.rows, grad_state, by_v, mirror=by_k, reverse=True
            )
            of_v, of_k = both[:1], both[1:]
            back = rows.sum_groups(grad_first).to(state.dtype) if asked.state else None
        elif by_k is not None:
            of_k, _ = trilinear(pattern, by.rows, rows.q, grad_state.mT, by_k, reverse=True)
        if asked.decay:
            at_end = None if grad_last is None else grad_state * rows.spread(last, 0)
            grad_decay = decay_gradient(of_q[1], of_k[1], at_end, decay)
    pairs = zip((of_q, of_k, of_v), (q, k, v), strict=True)
    found = [made[0].to(x.dtype) if made else None for made, x in pairs]
    return *asked.only(found), grad_decay, back


class _Gradients:
    """What the sweeps of a backward pass read, and what becomes of their sums."""

    def __init__(
        self,
        ctx: Any,
        saved: tuple[Any, ...],
        rows: Operands,
        asked: Asked,
        grad_out: Tensor | None,
        grad_total: Tensor | None,
    ) -> None:
        self.q, _, self.v = saved[:3]
        self.out, self.total = saved[10:12]
        self.of, self.asked = rows, asked
        self.grad_out, self.grad_total = grad_out, grad_total
        self.rule, self.eps, self.scale = ctx.rule, ctx.eps, ctx.scale
        self.slopes = FEATURE_MAPS[ctx.feature_map].backward

    def rows(self, span: Span, into: Into) -> Tensor:
        """[g δ], or g times the scale."""
        outputs = fold(self.out, span)
        if self.grad_out is None:
            grad = torch.zeros_like(outputs, dtype=self.of.dtype)
        else:
            grad = fold(self.grad_out, span).to(self.of.dtype)
        if self.rule == "none":
            return placed(grad if self.scale == 1 else grad * self.scale, into)
        row_total = fold(self.total[..., None], span)
        grad = grad / denominator(row_total, self.rule, self.eps)
        delta = (grad * outputs).sum(-1, keepdim=True)
        delta = -delta * slope(row_total, self.rule, self.eps)
        if self.grad_total is not None:
            delta = delta + fold(self.grad_total[..., None], span)
        return placed(grad, into, column=delta)

    def finish_q(self, span: Span, grad: Tensor) -> tuple[Tensor, ...]:
        dq = self.slopes(grad, fold(self.q, span).to(self.of.dtype))
        return dq, *self._dots(grad, self.of.q, span)

    def finish_k(self, span: Span, grad: Tensor) -> tuple[Tensor, ...]:
        dk = self.slopes(self.of.sum_groups(grad), self.of.keys(span))
        return self.of.hide(dk, span), *self._dots(grad, self.of.k, span)

    def finish_v(self, span: Span, grad: Tensor) -> tuple[Tensor, ...]:
        return (self.of.hide(self.of.sum_groups(grad[..., : self.v.shape[-1]]), span),)

    def room(self, x: Tensor) -> tuple[Tensor, ...]:
        """For a gradient and its dots."""
        shape = (*self.q.shape[:2], x.shape[2], 1)
        dots = (x.new_empty(shape, dtype=self.of.dtype),) if self.asked.decay else ()
        return torch.empty_like(x), *dots

    def _dots(self, grad: Tensor, load: Load, span: Span) -> tuple[Tensor, ...]:
        """φ·dφ of each row, of which the decay's gradient is made up."""
        if not self.asked.decay:
            return ()
        return ((grad * load(span, nowhere)).sum(-1, keepdim=True),)
