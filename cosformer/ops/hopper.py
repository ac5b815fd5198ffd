"""Attention on Hopper GPUs by `hopper.cu`: compiled on first use, launched with little ado.

Forward, dq, dk and dv are one kernel with its operands in other roles; see the head of that file.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.hopper_plan import plan_of
from cosformer.ops.hopper_roles import MAPS
from cosformer.ops.nvrtc import libraries
from cosformer.ops.problem import outputs
from cosformer.ops.tape import taped

MAX_WIDTH = 128
__all__ = ["MAPS", "aligned", "backward", "forward", "unsupported"]


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, bounds: Tensor | None, states: int,
    causal: bool, rule: str,
) -> str | None:  # fmt: skip
    """What these kernels need and do not get; None if they can compute the problem."""
    if bounds is not None or states > 2:
        return "plain or cosine weights, without packing"
    if decay is not None and not (causal and states == 1 and rule == "none"):
        return "plain weights and no denominator beside a decay"
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return "tensors that begin at multiples of 16 bytes"
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    return _unsupported(q.dtype, q.device, shapes, strides)


@functools.lru_cache(1024)
def _unsupported(
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
) -> str | None:
    if dtype != torch.bfloat16:
        return f"bfloat16, got {dtype}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "a Hopper GPU"
    try:
        libraries()
    except RuntimeError as error:
        return str(error)
    if shapes[0][1] != shapes[1][1]:
        return f"as many heads of k as of q, got {shapes[1][1]} and {shapes[0][1]}"
    for shape, stride in zip(shapes, strides, strict=True):
        if not math.prod(shape):
            return "at least one token"
        if shape[3] > MAX_WIDTH or shape[3] % 8:
            return f"widths up to {MAX_WIDTH} that 8 divides, got {shape[3]}"
        if not _in_pieces(stride):
            return f"rows in one piece that begin at multiples of 16 bytes, got strides {stride}"
    return None


def _in_pieces(strides: tuple[int, ...]) -> bool:
    b, h, t, one = strides
    return one == 1 and not (b % 8 or h % 8 or t % 8)


@taped
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    key_mask: Tensor | None,
    query_basis: Tensor,
    key_basis: Tensor,
    causal: bool,
    feature_map: str,
    rule: str,
    eps: float,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `forward_pass` in `fused.py`; kept are the states that backward begins with."""
    query_basis, key_basis = query_basis.contiguous(), key_basis.contiguous()
    state = None if state is None else state.contiguous()
    plan = plan_of(
        q, k, v, query_basis, key_mask, decay, feature_map, rule, eps, causal, state is None, wanted
    )
    if decay is not None:
        decay = decay.contiguous()
        key_basis = plan.since(decay)
    out, total = outputs(q, v, rule)
    rows, roles, mask = plan.causal_rows, plan.roles, _bytes(key_mask)
    given: dict[str, Any] = {"out": out, "total": total, "mask": mask}
    if causal and rows >= q.shape[2]:
        last = plan.states(q) if wanted else None
        plan.sweep(roles.forward, q, k, v, key_basis, rows, first=state, last=last, **given)
        return out, total, last, None
    if causal:
        first, last = plan.gather(
            roles.gather, k, v, key_basis, rows, state, mask,
            causal=True, total=wanted, decay=decay,
        )  # fmt: skip
        plan.sweep(roles.forward, q, k, v, key_basis, rows, first=first, **given)
        return out, total, last, first
    rows = plan.gather_keys
    _, last = plan.gather(roles.gather, k, v, key_basis, rows, state, mask, causal=False)
    plan.sweep(roles.read, q, q, v, query_basis, plan.read_queries, first=last, **given)
    return (out, total, last, None) if wanted else (out, total, None, last)


@taped
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    key_mask: Tensor | None,
    query_basis: Tensor,
    key_basis: Tensor,
    out: Tensor,
    total: Tensor,
    grad: Tensor,
    grad_last: Tensor | None,
    causal: bool,
    feature_map: str,
    rule: str,
    eps: float,
    kept: Tensor | None,
    dots: bool,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """As `backward_pass` in `fused.py`, with room for dq and dk where the caller has it.

    Under the rule `apart`, `total` is the gradient of the totals, and `out` does not count.
    """
    grad, out = aligned(grad), aligned(out)
    query_basis, key_basis = query_basis.contiguous(), key_basis.contiguous()
    state = None if state is None else state.contiguous()
    grad_last = None if grad_last is None else grad_last.contiguous()
    plan = plan_of(
        q, k, v, query_basis, key_mask, decay, feature_map, rule, eps, causal, state is None,
        grad_last is None, grad.stride(), out.stride(), *(x.stride() for x in into or ()),
        dots=dots and decay is not None,
    )  # fmt: skip
    if decay is not None:
        decay = decay.contiguous()
        key_basis = plan.since(decay)
    dq, dk = into or (torch.empty_like(q), k.new_empty(k.shape))  # as the fakes
    dv = v.new_empty(v.shape)
    rows, roles, mask = plan.causal_rows, plan.roles, _bytes(key_mask)
    by_row = None
    if plan.sums:
        by_row = plan.prepare(grad, out, total) if plan.divides else (None, total)
    by: dict[str, Any] = {"by_row": by_row, "mask": mask}
    wanted = state is not None
    if causal:
        first, end, grad_first = state, grad_last, None
        cut = rows < q.shape[2]
        if cut:
            first = kept
        if cut and kept is None:
            first, _ = plan.gather(
                roles.gather, k, v, key_basis, rows, state, mask,
                causal=True, total=False, decay=decay,
            )  # fmt: skip
        by_query, by_key = plan.dots(q), plan.dots(k)
        starts: dict[str, Any] = {"first": first, "total": by_query}
        plan.sweep(roles.dq, grad, v, k, key_basis, rows, out=dq, gate=q, **starts, **by)
        if cut:
            end, grad_first = plan.gather(
                roles.dk_gather, grad, q, key_basis, rows, grad_last, None, by_row,
                causal=True, total=wanted, decay=decay,
            )  # fmt: skip
        elif wanted:
            grad_first = plan.states(q)
        last = None if cut else grad_first
        ends: dict[str, Any] = {"first": end, "last": last, "total": by_key}
        plan.sweep(roles.dk, v, grad, q, key_basis, rows, out=dk, gate=k, **ends, **by)
        plan.sweep(roles.dv, k, q, grad, key_basis, rows, out=dv, first=end, **by)
        return dq, dk, dv, grad_first, by_query, by_key
    first = kept
    if first is None:
        rows = plan.gather_keys
        _, first = plan.gather(roles.gather, k, v, key_basis, rows, state, mask, causal=False)
    here, there = plan.read_queries, plan.read_keys
    plan.sweep(roles.dq_read, grad, grad, k, query_basis, here, out=dq, gate=q, first=first, **by)
    _, grad_first = plan.gather(
        roles.dk_gather, grad, q, query_basis, plan.gather_queries, grad_last, None, by_row,
        causal=False,
    )  # fmt: skip
    plan.sweep(roles.dk_read, v, v, q, key_basis, there, out=dk, gate=k, first=grad_first, **by)
    plan.sweep(roles.dv_read, k, k, grad, key_basis, there, out=dv, first=grad_first, **by)
    return dq, dk, dv, grad_first if wanted else None, None, None


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows are in one piece and begin where 16 bytes do."""
    if _in_pieces(x.stride()) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
