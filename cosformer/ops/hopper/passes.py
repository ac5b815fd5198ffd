"""Attention on Hopper GPUs by `sweep.cu`: compiled on first use, launched with little ado.

Forward, dq, dk and dv are one kernel with its operands in other roles; see the head of that file.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.autograd.asked import Asked
from cosformer.ops.hopper.nvrtc import libraries
from cosformer.ops.hopper.plan import Plan, plan_of
from cosformer.ops.hopper.roles import MAPS
from cosformer.ops.problem.problem import outputs
from cosformer.ops.replay.tape import taped

MAX_WIDTH = 128
__all__ = ["MAPS", "aligned", "backward", "forward", "unsupported"]


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, bounds: Tensor | None, states: int,
    causal: bool,
) -> str | None:  # fmt: skip
    """What these kernels need and do not get; None if they can compute the problem."""
    if bounds is not None or states > 2:
        return "plain or cosine weights, without packing"
    if decay is not None and not (causal and states == 1):
        return "plain weights beside a decay"
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
    query_basis: Tensor | None,
    key_basis: Tensor | None,
    causal: bool,
    feature_map: str,
    rule: str,
    eps: float,
    scale: float,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `forward_pass` in `fused.py`; kept are the states that backward begins with."""
    query_basis, key_basis, state = (_dense(x) for x in (query_basis, key_basis, state))
    plan = plan_of(
        q, k, v, query_basis, key_mask, decay, feature_map, rule, eps, scale, causal, state is None,
        wanted,
    )  # fmt: skip
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
    scale: float,
    asked: Asked,
    kept: Tensor | None,
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor | None, ...]:
    """As `backward_pass` in `fused.py`, with room for dq and dk where the caller has it."""
    grad, out = aligned(grad), aligned(out)
    query_basis, key_basis = query_basis.contiguous(), key_basis.contiguous()
    # Sums of q and dout are scaled where they are read, and what joins them from the end as well.
    state, grad_last = _dense(state), _times(_dense(grad_last), 1 / scale)
    plan = plan_of(
        q, k, v, query_basis, key_mask, decay, feature_map, rule, eps, scale, causal, state is None,
        grad_last is None, asked.state, grad.stride(), out.stride(),
        *(None if x is None else x.stride() for x in into), dots=asked.decay,
    )  # fmt: skip
    if decay is not None:
        decay = decay.contiguous()
        key_basis = plan.since(decay)
    dq, dk = into
    if dq is None and asked.sweeps_q:
        dq = torch.empty_like(q)  # as the fakes
    if dk is None and asked.sweeps_k:
        dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape) if asked.v else None
    by_row = plan.prepare(grad, out, total) if plan.sums else None
    by: dict[str, Any] = {"by_row": by_row, "mask": _bytes(key_mask)}
    found, rows, ends = (dq, dk, dv), (q, k, v, grad), (state, kept, grad_last)
    if causal:
        back, *dots = _causal_sweeps(plan, asked, rows, found, by, key_basis, decay, ends)
    else:
        bases = (query_basis, key_basis)
        back, dots = _sweeps_both_ways(plan, asked, rows, found, by, bases, ends), [None, None]
    return *found, _times(back, scale), *dots


Found = tuple[Tensor | None, Tensor | None, Tensor | None]  # dq, dk, dv
Ends = tuple[Tensor | None, Tensor | None, Tensor | None]  # state, what forward kept, grad_last


def _causal_sweeps(
    plan: Plan, asked: Asked, rows: tuple[Tensor, ...], found: Found, by: dict[str, Any],
    basis: Tensor, decay: Tensor | None, ends: Ends,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The state's gradient, φ(q)·dφ(q) and φ(k)·dφ(k), where they are asked for."""
    (q, k, v, grad), (dq, dk, dv), (state, kept, grad_last) = rows, found, ends
    length, roles = plan.causal_rows, plan.roles
    cut = length < q.shape[2]
    by_query, by_key, grad_first = plan.dots(q), plan.dots(k), None
    if asked.sweeps_q:
        first = kept if cut else state
        if cut and kept is None:
            first, _ = plan.gather(
                roles.gather, k, v, basis, length, state, by["mask"],
                causal=True, total=False, decay=decay,
            )  # fmt: skip
        starts: dict[str, Any] = {"first": first, "total": by_query, **by}
        plan.sweep(roles.dq, grad, v, k, basis, length, out=dq, gate=q, **starts)
    if cut and asked.reverse:
        grad_last, grad_first = plan.gather(
            roles.dk_gather, grad, q, basis, length, grad_last, None, by["by_row"],
            causal=True, total=asked.state, decay=decay,
        )  # fmt: skip
    elif asked.state:
        grad_first = plan.states(q)
    if asked.sweeps_k:
        last = None if cut else grad_first
        stops: dict[str, Any] = {"first": grad_last, "last": last, "total": by_key, **by}
        plan.sweep(roles.dk, v, grad, q, basis, length, out=dk, gate=k, **stops)
    if asked.v:
        plan.sweep(roles.dv, k, q, grad, basis, length, out=dv, first=grad_last, **by)
    return grad_first, by_query, by_key


def _sweeps_both_ways(
    plan: Plan, asked: Asked, rows: tuple[Tensor, ...], found: Found, by: dict[str, Any],
    bases: tuple[Tensor, Tensor], ends: Ends,
) -> Tensor | None:  # fmt: skip
    """The state's gradient, where it is asked for."""
    (q, k, v, grad), (dq, dk, dv), (state, first, grad_last) = rows, found, ends
    (at_queries, at_keys), roles, grad_first = bases, plan.roles, None
    if asked.sweeps_q:
        if first is None:
            _, first = plan.gather(
                roles.gather, k, v, at_keys, plan.gather_keys, state, by["mask"], causal=False
            )
        reads: dict[str, Any] = {"out": dq, "gate": q, "first": first, **by}
        plan.sweep(roles.dq_read, grad, grad, k, at_queries, plan.read_queries, **reads)
    if asked.reverse:
        _, grad_first = plan.gather(
            roles.dk_gather, grad, q, at_queries, plan.gather_queries, grad_last, None,
            by["by_row"], causal=False,
        )  # fmt: skip
    reads = {"first": grad_first, **by}
    if asked.sweeps_k:
        plan.sweep(roles.dk_read, v, v, q, at_keys, plan.read_keys, out=dk, gate=k, **reads)
    if asked.v:
        plan.sweep(roles.dv_read, k, k, grad, at_keys, plan.read_keys, out=dv, **reads)
    return grad_first if asked.state else None


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _times(x: Tensor | None, factor: float) -> Tensor | None:
    return x if x is None or factor == 1 else x * factor


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows are in one piece and begin where 16 bytes do."""
    if _in_pieces(x.stride()) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
