"""Both passes of attention by `sweep.cu`: compiled on first use, launched with little ado.

Forward, dq, dk and dv are one kernel with its operands in other roles; see the head of that file.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.ops.hopper.nvrtc import libraries
from cosformer.ops.hopper.plan import Common, Dots, Plan, plan_of
from cosformer.ops.hopper.roles import Roles
from cosformer.ops.problem import (
    WEIGHTS,
    Asked,
    Given,
    Grads,
    Problem,
    Results,
    Swept,
    for_each_query_head,
    room_for_outputs,
)
from cosformer.runtime import eager

MAX_WIDTH = 128


def why_not(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    """What these kernels need and do not get; None if they can compute the problem."""
    decays = problem.query_decay is not None or problem.gates is not None
    if (problem.causal or decays) and (problem.query_start != 0 or q.shape[2] != k.shape[2]):
        rule = "as many queries as keys under causal=True or a decay"
        return f"{rule}, got {q.shape[2]} and {k.shape[2]}"
    if WEIGHTS[problem.weight] > 2:
        return "plain or cosine weights"
    if not eager(q, k, v):  # a tracer ignores caches, and warns of it
        return _why_not_tensors.__wrapped__(q.dtype, q.device, *_shapes(q, k, v))
    return _why_not_here(q, k, v)


def why_not_given(given: Given) -> str | None:
    """`why_not` for a problem that is already built, as inside an operator of torch."""
    if given.constants.query_basis.shape[3] > 2:
        return "plain or cosine weights"
    return _why_not_here(given.q, given.k, given.v)


def places(q: Tensor, k: Tensor, cu_seqlens: Tensor, weight: str) -> bool:
    """Whether a kernel may say where packed tokens stand: where sweeps are likely to follow."""
    served = WEIGHTS[weight] <= 2 and q.is_cuda and eager(q, k, cu_seqlens)
    return served and _why_not_here(q, k, k) is None


def _why_not_here(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return "tensors that begin at multiples of 16 bytes"
    return _why_not_tensors(q.dtype, q.device, *_shapes(q, k, v)) or _why_not_compiled()


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
    for shape, stride in zip(shapes, strides, strict=True):
        if not math.prod(shape):
            return "at least one token"
        if shape[3] > MAX_WIDTH or shape[3] % 8:
            return f"widths up to {MAX_WIDTH} that 8 divides, got {shape[3]}"
        if not _in_pieces(stride):
            return f"rows in one piece that begin at multiples of 16 bytes, got strides {stride}"
    return None


@functools.cache
def _why_not_compiled() -> str | None:
    """Why this machine cannot compile the kernels; a graph, which opens no files, fails later."""
    try:
        libraries()
    except RuntimeError as error:
        return str(error)
    return None


def _in_pieces(strides: tuple[int, ...]) -> bool:
    b, h, t, one = strides
    return one == 1 and not (b % 8 or h % 8 or t % 8)


def forward(given: Given) -> Results:
    """Output, row totals, the last state, and the states that backward begins with."""
    q, k, v, options = given.q, given.k, given.v, given.options
    wanted, plan = options.keep_state, plan_of(given)
    query_basis = given.constants.query_basis.contiguous()
    key_basis, state = given.constants.key_basis.contiguous(), _dense(given.state)
    common, roles, cut = _common(given, plan), plan.roles, plan.causal
    fading = None if options.even else common.decay
    out, total = room_for_outputs(q, v, options.rule)
    made: dict[str, Any] = {"out": out, "total": total}
    if given.decay is not None and not options.causal:
        _forward_both_ways(plan, q, k, v, key_basis, common, **made)
        last = torch.zeros_like(plan.states()) if wanted else None
        return Results(out, total, last, fading=fading)
    if options.causal and not plan.is_cut:
        last = plan.states() if wanted and not plan.packed else None
        plan.sweep(roles.forward, q, k, v, key_basis, cut, common, first=state, last=last, **made)
        if wanted and plan.packed:  # a graph wants some state; nobody goes on with it
            last = torch.zeros_like(plan.states())
        return Results(out, total, last, fading=fading)
    if options.causal:
        first, last = plan.gather(roles.gather, k, v, key_basis, cut, common, state, total=wanted)
        plan.sweep(roles.forward, q, k, v, key_basis, cut, common, first=first, **made)
        return Results(out, total, last, first, fading)
    _, last = plan.gather(roles.gather, k, v, key_basis, plan.gather_keys, common, state)
    plan.sweep(roles.read, q, q, v, query_basis, plan.read_queries, common, first=last, **made)
    if plan.packed:
        return Results(out, total, torch.zeros_like(plan.states()) if wanted else None, last)
    return Results(out, total, last) if wanted else Results(out, total, None, last)


def _forward_both_ways(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, basis: Tensor, common: Common, *,
    out: Tensor, total: Tensor,
) -> None:  # fmt: skip
    """A decay without causality: a sweep from the start, and one from the end that adds to it."""
    past = torch.empty_like(total)
    for roles, made, before in (
        (plan.roles, past, None),
        (plan.roles.reversed(), total, past),
    ):
        first = None
        if plan.is_cut:
            first, _ = plan.gather(roles.gather, k, v, basis, plan.causal, common, total=False)
        plan.sweep(
            roles.forward, q, k, v, basis, plan.causal, common,
            out=out, total=made, before=before, first=first,
        )  # fmt: skip


class _Back(NamedTuple):
    """What the sweeps of a backward pass have in common."""

    plan: Plan
    asked: Asked
    common: Common
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    dq: Tensor | None
    dk: Tensor | None  # dk and dv have every query head
    dv: Tensor | None
    query_basis: Tensor
    key_basis: Tensor
    state: Tensor | None
    kept: Tensor | None  # the states that forward kept
    grad_last: Tensor | None


class _Found(NamedTuple):
    """What backward sweeps make beside dq, dk and dv."""

    state: Tensor | None
    dots: Dots = (None, None)
    less: Dots = (None, None)  # those of the other direction, to be taken away


def backward(given: Given, results: Results, grads: Grads, asked: Asked) -> Swept:
    """The gradients that are asked for; states and their gradients are those of query heads."""
    swept, found, _ = _backward(given, results, grads, asked)
    by_query, by_key = map(_less, found.dots, found.less)
    return swept._replace(by_query=_summed(by_query), by_key=_summed(by_key))


def backward_with_decay(given: Given, results: Results, grads: Grads, asked: Asked) -> Swept:
    """`backward` with the gradient of the decay itself, in place of φ(q)·dφ(q) and φ(k)·dφ(k)."""
    swept, found, plan = _backward(given, results, grads, asked)
    if not asked.decay or given.decay is None:
        return swept
    at_start = at_end = None
    if given.state is not None and swept.state is not None:
        at_start = (given.state * swept.state).sum((-3, -2, -1))
    if grads.last is not None and results.last is not None:
        last = for_each_query_head(results.last, given.q.shape[1] // results.last.shape[1])
        at_end = (grads.last * last).sum((-3, -2, -1))
    grad = plan.decay_gradient(given.decay, found.dots, found.less, at_start, at_end)
    shared = grad.shape != given.decay.shape
    return swept._replace(decay=grad.sum_to_size(given.decay.shape) if shared else grad)


def _backward(
    given: Given, results: Results, grads: Grads, asked: Asked
) -> tuple[Swept, "_Found", Plan]:
    q, k, v, options = given.q, given.k, given.v, given.options
    assert grads.out is not None
    grad, out, total = aligned(grads.out), aligned(results.out), results.total
    # Sums of q and dout are scaled where they are read, and what joins them from the end as well.
    state, grad_last = _dense(given.state), _times(_dense(grads.last), 1 / options.scale)
    about = (grad_last is None, asked.state, grad.stride(), out.stride())
    plan = plan_of(given, *about, dots=asked.decay)
    back = _Back(
        plan, asked,
        _common(given, plan, results.fading)._replace(
            by_row=plan.prepare(grad, out, total) if plan.sums else None
        ),
        q, k, v, grad,
        torch.empty_like(q) if asked.sweeps_q else None,  # as the fakes
        k.new_empty(*q.shape[:2], *k.shape[2:]) if asked.sweeps_k else None,
        v.new_empty(*q.shape[:2], *v.shape[2:]) if asked.v else None,
        given.constants.query_basis.contiguous(), given.constants.key_basis.contiguous(),
        state, results.kept, grad_last,
    )  # fmt: skip
    if options.causal:
        found = _causal_sweeps(back, plan.roles)
    elif given.decay is not None:
        past = _causal_sweeps(back, plan.roles)
        future = _causal_sweeps(back, plan.roles.reversed())
        # L_i − L_j from the start, L_j − L_i from the end
        state = torch.zeros_like(plan.states()) if asked.state else None
        found = _Found(state, past.dots, future.dots)
    else:
        found = _sweeps_both_ways(back)
    swept = Swept(
        back.dq if asked.q else None,
        _per_key_head(back.dk, k) if asked.k else None,
        _per_key_head(back.dv, v),
        _times(found.state, options.scale),
    )
    return swept, found, plan


def _causal_sweeps(back: _Back, roles: Roles) -> _Found:
    """The sweeps for dq, dk and dv that carry a state through all rows, as `roles` direct."""
    plan, asked, common, basis, cut = (
        back.plan, back.asked, back.common, back.key_basis, back.plan.causal
    )  # fmt: skip
    q, k, v, grad, grad_last = back.q, back.k, back.v, back.grad, back.grad_last
    by_query, by_key, grad_first = plan.dots(q), plan.dots(k), None
    if asked.sweeps_q:
        first = back.kept if plan.is_cut else back.state
        if plan.is_cut and first is None:
            first, _ = plan.gather(
                roles.gather, k, v, basis, cut, common, back.state, total=False
            )  # fmt: skip
        plan.sweep(
            roles.dq, grad, v, k, basis, cut, common,
            out=back.dq, gate=q, first=first, total=by_query,
        )  # fmt: skip
    if plan.is_cut and asked.reverse:
        grad_last, grad_first = plan.gather(
            roles.dk_gather, grad, q, basis, cut, common, grad_last, total=asked.state
        )
    elif asked.state:
        grad_first = plan.states()
    if asked.sweeps_k:
        plan.sweep(
            roles.dk, v, grad, q, basis, cut, common, out=back.dk, gate=k, first=grad_last,
            last=None if plan.is_cut else grad_first, total=by_key,
        )  # fmt: skip
    if asked.v:
        plan.sweep(roles.dv, k, q, grad, basis, cut, common, out=back.dv, first=grad_last)
    return _Found(grad_first, (by_query, by_key))


def _sweeps_both_ways(back: _Back) -> _Found:
    """Sums over all rows, which every row then reads."""
    plan, asked, common, roles = back.plan, back.asked, back.common, back.plan.roles
    q, k, v, grad, first, grad_first = back.q, back.k, back.v, back.grad, back.kept, None
    if asked.sweeps_q:
        if first is None:
            _, first = plan.gather(
                roles.gather, k, v, back.key_basis, plan.gather_keys, common, back.state
            )
        plan.sweep(
            roles.dq_read, grad, grad, k, back.query_basis, plan.read_queries, common,
            out=back.dq, gate=q, first=first,
        )  # fmt: skip
    if asked.reverse:
        _, grad_first = plan.gather(
            roles.dk_gather, grad, q, back.query_basis, plan.gather_queries, common, back.grad_last
        )
    if asked.sweeps_k:
        plan.sweep(
            roles.dk_read, v, v, q, back.key_basis, plan.read_keys, common,
            out=back.dk, gate=k, first=grad_first,
        )  # fmt: skip
    if asked.v:
        plan.sweep(
            roles.dv_read, k, k, grad, back.key_basis, plan.read_keys, common,
            out=back.dv, first=grad_first,
        )  # fmt: skip
    return _Found(grad_first if asked.state else None)


def _common(given: Given, plan: Plan, fading: Tensor | None = None) -> Common:
    """`fading`: what forward made of the decay."""
    mask, bounds, decay = given.constants.key_mask, given.constants.bounds, given.decay
    bounds = None if bounds is None else bounds.to(torch.int32).contiguous()
    if decay is not None and not given.options.even:
        decay = plan.sum_gates(decay, bounds) if fading is None else fading
    return Common(
        None if mask is None else mask.contiguous().view(torch.uint8),
        None if decay is None else decay.contiguous(),
        bounds,
    )


def _per_key_head(grad: Tensor | None, rows: Tensor) -> Tensor | None:
    """A gradient summed over the heads of q that share a head of k."""
    if grad is None or grad.shape[1] == rows.shape[1]:
        return grad
    return grad.unflatten(1, (rows.shape[1], -1)).sum(2)


def _less(past: Tensor | None, future: Tensor | None) -> Tensor | None:
    return past if past is None or future is None else past - future


def _summed(dots: Tensor | None) -> Tensor | None:
    """Dots summed over the blocks of columns."""
    return dots if dots is None or dots.shape[3] == 1 else dots.sum(-1, keepdim=True)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _times(x: Tensor | None, factor: float) -> Tensor | None:
    return x if x is None or factor == 1 else x * factor


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows are in one piece and begin where 16 bytes do."""
    if _in_pieces(x.stride()) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
