"""Both passes of attention by kernels, as the autograd function in `chunked.py` calls them."""

from typing import Any

import torch
from torch import Tensor

from cosformer.ops.autograd import balance
from cosformer.ops.autograd.asked import Asked
from cosformer.ops.chunked.operands import Operands
from cosformer.ops.chunked.trilinear import decay_gradient
from cosformer.ops.triton.operators import (
    backward_pass,
    forward_pass,
    fused_backward,
    fused_forward,
)
from cosformer.runtime import eager


def forward(
    rows: Operands,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    *others: Any,
    wanted: bool,
) -> tuple[Tensor | None, ...]:
    """Output, row totals, the last state if `wanted`, and what is kept for backward if anything.

    `others` are the rest of what `forward_pass` takes, in its order.
    """
    first = None if state is None else rows.spread(state, 0)
    given: list[Any] = [q, k, v, decay, first, *others]
    kept: Tensor | None = None
    last: Tensor | None
    if eager(q, k, v):  # an operator costs 20 µs
        out, total, last, kept = forward_pass(*[*given, wanted])
    else:
        out, total, last = fused_forward(*given)
    if last is not None and rows.groups > 1:
        last = last[:, :: rows.groups]
    return (out, total, last) if kept is None else (out, total, last, kept)


def backward(
    ctx: Any,
    saved: tuple[Any, ...],
    rows: Operands,
    grad_out: Tensor | None,
    grad_last: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, the decay and the state; `saved` may be unpacked once only."""
    q, k, v, decay, state, key_mask, query_basis, key_basis, _, bounds, *outputs = saved
    out, total, last, *kept = outputs
    first = None if state is None else rows.spread(state, 0)
    end = None if grad_last is None else rows.spread_last(grad_last, grad_last)
    grad = torch.zeros_like(out) if grad_out is None else grad_out
    arrays = (decay, first, key_mask, query_basis, key_basis, bounds)
    options = (ctx.causal, ctx.feature_map, ctx.rule, ctx.eps, ctx.scale)
    given = (q, k, v, *arrays, out, total, grad, end, *options)
    asked = Asked(*ctx.needs_input_grad[:5])
    if asked.decay and state is not None:  # whose gradient tells what that of the decay sums to
        asked = asked._replace(state=True)
    found: Any
    if eager(q, k, grad):
        found = backward_pass(*given, asked, *kept)
    else:
        found = fused_backward(*given, list(asked))
    *_, grad_first, by_query, by_key = found
    grad_decay = None
    if asked.decay and first is None and end is None and balance.is_served(by_query, decay):
        grad_decay = balance.balanced(by_query, by_key, decay)
    elif asked.decay:
        at_end = None if end is None else end * rows.spread(last, 0)
        at_start = by_key.new_zeros(by_key.shape[:2])
        if first is not None:
            at_start = (first * grad_first).sum((-3, -2, -1))
        grad_decay = decay_gradient(by_query, by_key, at_end, decay, at_start)
    back = rows.sum_groups(grad_first).to(state.dtype) if asked.state else None
    return *asked.only(found), grad_decay, back
