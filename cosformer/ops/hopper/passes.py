"""Both passes of attention by `sweep.cu`: compiled on first use, launched with little ado.

Forward, dq, dk and dv are one kernel with its operands in other roles; see the head of that file.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cosformer.ops.hopper.nvrtc import libraries
from cosformer.ops.hopper.plan import PerRow, Plan, plan_of
from cosformer.ops.hopper.roles import MAPS
from cosformer.ops.hopper.watch import watcher
from cosformer.ops.problem import (
    WEIGHTS,
    Asked,
    Given,
    Grads,
    Problem,
    Results,
    Swept,
    room_for_outputs,
)
from cosformer.runtime import eager

MAX_WIDTH = 128
__all__ = ["MAPS", "aligned", "backward", "forward", "why_not", "why_not_given"]

Found = TypeVar("Found")


def why_not(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    """What these kernels need and do not get; None if they can compute the problem."""
    if problem.causal and (problem.query_start != 0 or q.shape[2] != k.shape[2]):
        return f"as many queries as keys under causal=True, got {q.shape[2]} and {k.shape[2]}"
    states = WEIGHTS[problem.weight]
    decays = problem.query_decay is not None or problem.gates is not None
    if reason := _why_not_weights(states, decays, problem.causal, problem.bounds is not None):
        return reason
    if not eager(q, k, v):
        return _why_not_tensors(q.dtype, q.device, *_shapes(q, k, v))
    return _why_not_here(q, k, v)


def why_not_given(given: Given) -> str | None:
    """The same of a problem on its way, whose tensors are here."""
    states = given.constants.query_basis.shape[3]
    decays, packed = given.decay is not None, given.constants.bounds is not None
    reason = _why_not_weights(states, decays, given.options.causal, packed)
    return reason or _why_not_here(given.q, given.k, given.v)


def _why_not_weights(states: int, decays: bool, causal: bool, packed: bool) -> str | None:
    if packed or states > 2:
        return "plain or cosine weights, without packing"
    if decays and not (causal and states == 1):
        return "plain weights beside a decay"
    return None


def _why_not_here(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return "tensors that begin at multiples of 16 bytes"
    return _why_not_tensors(q.dtype, q.device, *_shapes(q, k, v))


def _shapes(*tensors: Tensor) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    return tuple(tuple(x.shape) for x in tensors), tuple(x.stride() for x in tensors)


@functools.lru_cache(1024)
def _why_not_tensors(
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


def _watched(work: Callable[..., Found]) -> Callable[..., Found]:
    """A pass that somebody may watch; its first argument is what was given."""

    @functools.wraps(work)
    def run(given: Given, *others: Any) -> Found:
        by = watcher()
        if by is None:
            return work(given, *others)
        about = given.constants
        flat = [given.q, given.k, given.v, given.state, about.key_mask]
        flat += [x for other in others for x in other]
        constants = (given.decay, about.query_basis, about.key_basis)
        found: Found = by.run(
            functools.partial(work, given, *others),
            given,
            [x for x in flat if isinstance(x, Tensor)],
            [x for x in constants if x is not None],
        )
        return found

    return run


@_watched
def forward(given: Given) -> Results:
    """Output, row totals, the last state, and the states that backward begins with."""
    q, k, v, options = given.q, given.k, given.v, given.options
    causal, wanted = options.causal, options.keep_state
    query_basis, key_basis = (given.constants.query_basis.contiguous(), given.constants.key_basis)
    key_basis, state, decay = key_basis.contiguous(), _dense(given.state), given.decay
    plan = plan_of(given)
    if decay is not None:
        decay = decay.contiguous()
        key_basis = plan.since(decay)
    out, total = room_for_outputs(q, v, options.rule)
    rows, roles, mask = plan.causal_rows, plan.roles, _bytes(given.constants.key_mask)
    made: dict[str, Any] = {"out": out, "total": total, "mask": mask}
    if causal and rows >= q.shape[2]:
        last = plan.states(q) if wanted else None
        plan.sweep(roles.forward, q, k, v, key_basis, rows, first=state, last=last, **made)
        return Results(out, total, last)
    if causal:
        first, last = plan.gather(
            roles.gather, k, v, key_basis, rows, state, mask,
            causal=True, total=wanted, decay=decay,
        )  # fmt: skip
        plan.sweep(roles.forward, q, k, v, key_basis, rows, first=first, **made)
        return Results(out, total, last, first)
    rows = plan.gather_keys
    _, last = plan.gather(roles.gather, k, v, key_basis, rows, state, mask, causal=False)
    plan.sweep(roles.read, q, q, v, query_basis, plan.read_queries, first=last, **made)
    return Results(out, total, last) if wanted else Results(out, total, None, last)


class _Back(NamedTuple):
    """What the sweeps of a backward pass have in common."""

    plan: Plan
    asked: Asked
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    by: dict[str, Any]  # what every sweep is given: 1/D and δ of the rows, and the mask
    query_basis: Tensor
    key_basis: Tensor
    decay: Tensor | None
    state: Tensor | None
    kept: Tensor | None  # the states that forward kept
    grad_last: Tensor | None


@_watched
def backward(given: Given, results: Results, grads: Grads, asked: Asked) -> Swept:
    """The gradients that are asked for; states and their gradients are those of query heads."""
    q, k, v, options, decay = given.q, given.k, given.v, given.options, given.decay
    assert grads.out is not None
    grad, out, total = aligned(grads.out), aligned(results.out), results.total
    query_basis = given.constants.query_basis.contiguous()
    key_basis = given.constants.key_basis.contiguous()
    # Sums of q and dout are scaled where they are read, and what joins them from the end as well.
    state, grad_last = _dense(given.state), _times(_dense(grads.last), 1 / options.scale)
    about = (grad_last is None, asked.state, grad.stride(), out.stride())
    plan = plan_of(given, *about, dots=asked.decay)
    if decay is not None:
        decay = decay.contiguous()
        key_basis = plan.since(decay)
    by_row: PerRow | None = plan.prepare(grad, out, total) if plan.sums else None
    back = _Back(
        plan, asked, q, k, v, grad,
        torch.empty_like(q) if asked.sweeps_q else None,  # as the fakes
        k.new_empty(k.shape) if asked.sweeps_k else None,
        v.new_empty(v.shape) if asked.v else None,
        {"by_row": by_row, "mask": _bytes(given.constants.key_mask)},
        query_basis, key_basis, decay, state, results.kept, grad_last,
    )  # fmt: skip
    grad_first, by_query, by_key = (_causal_sweeps if options.causal else _sweeps_both_ways)(back)
    return Swept(
        back.dq if asked.q else None,
        back.dk if asked.k else None,
        back.dv,
        _times(grad_first, options.scale),
        _summed(by_query),
        _summed(by_key),
    )


def _causal_sweeps(back: _Back) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The state's gradient, φ(q)·dφ(q) and φ(k)·dφ(k), where they are asked for."""
    plan, asked, by, basis = back.plan, back.asked, back.by, back.key_basis
    length, roles, grad_last = plan.causal_rows, plan.roles, back.grad_last
    cut = length < back.q.shape[2]
    by_query, by_key, grad_first = plan.dots(back.q), plan.dots(back.k), None
    if asked.sweeps_q:
        first = back.kept if cut else back.state
        if cut and first is None:
            first, _ = plan.gather(
                roles.gather, back.k, back.v, basis, length, back.state, by["mask"],
                causal=True, total=False, decay=back.decay,
            )  # fmt: skip
        starts: dict[str, Any] = {"first": first, "total": by_query, **by}
        plan.sweep(
            roles.dq, back.grad, back.v, back.k, basis, length, out=back.dq, gate=back.q, **starts
        )
    if cut and asked.reverse:
        grad_last, grad_first = plan.gather(
            roles.dk_gather, back.grad, back.q, basis, length, grad_last, None, by["by_row"],
            causal=True, total=asked.state, decay=back.decay,
        )  # fmt: skip
    elif asked.state:
        grad_first = plan.states(back.q)
    if asked.sweeps_k:
        last = None if cut else grad_first
        stops: dict[str, Any] = {"first": grad_last, "last": last, "total": by_key, **by}
        plan.sweep(
            roles.dk, back.v, back.grad, back.q, basis, length, out=back.dk, gate=back.k, **stops
        )
    if asked.v:
        plan.sweep(
            roles.dv, back.k, back.q, back.grad, basis, length, out=back.dv, first=grad_last, **by
        )
    return grad_first, by_query, by_key


def _sweeps_both_ways(back: _Back) -> tuple[Tensor | None, None, None]:
    """The state's gradient, where it is asked for."""
    plan, asked, by, roles = back.plan, back.asked, back.by, back.plan.roles
    first, grad_first = back.kept, None
    if asked.sweeps_q:
        if first is None:
            _, first = plan.gather(
                roles.gather, back.k, back.v, back.key_basis, plan.gather_keys, back.state,
                by["mask"], causal=False,
            )  # fmt: skip
        reads: dict[str, Any] = {"out": back.dq, "gate": back.q, "first": first, **by}
        plan.sweep(
            roles.dq_read, back.grad, back.grad, back.k, back.query_basis, plan.read_queries,
            **reads,
        )  # fmt: skip
    if asked.reverse:
        _, grad_first = plan.gather(
            roles.dk_gather, back.grad, back.q, back.query_basis, plan.gather_queries,
            back.grad_last, None, by["by_row"], causal=False,
        )  # fmt: skip
    reads = {"first": grad_first, **by}
    at_keys, rows = back.key_basis, plan.read_keys
    if asked.sweeps_k:
        plan.sweep(
            roles.dk_read, back.v, back.v, back.q, at_keys, rows, out=back.dk, gate=back.k, **reads
        )
    if asked.v:
        plan.sweep(roles.dv_read, back.k, back.k, back.grad, at_keys, rows, out=back.dv, **reads)
    return grad_first if asked.state else None, None, None


def _summed(dots: Tensor | None) -> Tensor | None:
    """Dots summed over the blocks of columns."""
    return dots if dots is None or dots.shape[3] == 1 else dots.sum(-1, keepdim=True)


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
