"""One token of a stream: constant time, constant memory, the state changed where it stands."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.check import check_choice, check_eps, check_inputs, check_tensor, require_all
from cosformer.ops.linear import Arguments, check_arguments, check_goes_on
from cosformer.ops.problem import (
    FEATURE_MAPS,
    GATE_RULE,
    Rates,
    angle_of,
    angles,
    as_numbers,
    basis,
    check_gates,
    check_length,
    divisor,
    kind_of,
    least_gate,
    log_rates,
    whole_limit,
)
from cosformer.ops.state import State, check_continues, check_gates_go_on
from cosformer.ops.triton import fused_step, why_not_step
from cosformer.runtime import full_precision, mapped_over, on_device_of, on_gpu, readable


class Recurrence(NamedTuple):
    """The arguments of a step other than its tokens and its state; see `linear_attention`."""

    theta: Tensor  # [1, 1] or one per key head [H_kv, 1], float64
    weight: str = "cosine"
    feature_map: str = "relu"
    rule: str = "clamp"  # a name of DENOMINATORS, or "none"
    eps: float = 1e-6
    scale: float = 1.0
    decay: Tensor | None = None  # γ, what is left of the state: [1, H_kv or 1]
    log_decay: Tensor | None = None  # log γ of the present token, beside `decay`: [B, H_kv, 1]

    @property
    def left(self) -> Tensor | None:
        """What both decays leave of the state, `[B or 1, H_kv or 1]` in float64; None for all."""
        if self.log_decay is None:
            return self.decay
        left = self.log_decay[..., 0].double().exp()
        return left if self.decay is None else self.decay * left

    @property
    def is_cosformer(self) -> bool:
        """Whether it is attention as `step` computes it, which has a kernel."""
        decays_twice = self.decay is not None and self.log_decay is not None
        return (self.feature_map, self.rule) == ("relu", "clamp") and not decays_twice


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    log_decay: Tensor | None = None,
    slots: Tensor | None = None,
    eps: float = 1e-6,
    impl: str = "auto",
) -> Tensor:
    """Attention of one new token, at a cost that does not grow; `state` is updated in place.

    Args:
        q: `[B, H, 1, D]` (or `[B, H, D]`); k and v likewise, with the heads of the state.
        state: from `State.empty` or `attention_with_state`. Its tensors are changed.
        log_decay: log γ of the token, `[B, H_kv, 1]` (or `[B, H_kv]`), for a stream with a decay
            per token. A decay per head is the state's own.
        slots: `[B]` int64, for a state of more streams than B: which one each row belongs to, no
            two the same; a negative one is padding, whose output is zero. Needs one position per
            stream: `State.empty(..., position=torch.zeros(streams, dtype=torch.int64))`. On a GPU
            two that are the same go unnoticed, and under raised cosine weights or in a graph,
            where the host looks at nothing, any slot that does not exist.
        eps: the least denominator.
        impl: `auto`, `chunked` (plain torch) or `triton`.

    Returns:
        `[B, H, 1, V]` (or `[B, H, V]`). For inference: gradients go through `attention_with_state`.

    >>> state = State.empty(1, 8, 64, 64, horizon=4096)
    >>> q, k, v = torch.randn(3, 1, 8, 1, 64)
    >>> step(q, k, v, state).shape, int(state.position)
    (torch.Size([1, 8, 1, 64]), 1)
    """
    if all(isinstance(x, Tensor) and x.dim() == 3 for x in (q, k, v)):
        q, k, v = q[:, :, None], k[:, :, None], v[:, :, None]
        gates = log_decay[..., None] if isinstance(log_decay, Tensor) else log_decay
        return step(q, k, v, state, log_decay=gates, slots=slots, eps=eps, impl=impl)[:, :, 0]
    q, k, v = _one_token(q, k, v)
    _check_mapped(state, k, v, log_decay)
    streams = state.key_value.shape[0] if isinstance(state, State) else 0
    _check_slots(slots, k, state)
    shown = k if slots is None else k.new_empty(()).expand(streams, *k.shape[1:])
    horizon = check_continues(state, shown, v, None, None)
    check_gates_go_on(state, log_decay, k)
    check_eps(eps, state.key_value.dtype)
    check_choice("impl", impl, ("auto", "chunked", "triton"))
    _refuse_gradients(state, q, k, v, log_decay)
    reason = why_not_step(q, v, state)
    if impl == "triton" and reason:
        raise ValueError(f"impl='triton' needs {reason}: use impl='chunked'")
    kernels = impl == "triton" or (impl == "auto" and reason is None and q.is_cuda)
    limited = state.is_limited
    captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if limited and not (kernels and captured):
        check_length(1, horizon, _positions(state, slots, captured=captured))
    _check_gate(log_decay, q)
    if kernels:
        limit = whole_limit(horizon) if limited and captured else None
        turn = angle_of(horizon, k) if isinstance(horizon, Tensor) else math.pi / (2 * horizon)
        with on_device_of(q):
            return fused_step(
                q, k, v, state, turn, slots, eps, limit=limit, decay=state.rate, log_decay=log_decay
            )
    by = Recurrence(
        angle_of(horizon, k), state.weight, eps=eps, decay=state.rate, log_decay=log_decay
    )
    with full_precision(q):
        if slots is None:
            return _by_torch(q, k, v, state, by)
        return _in_slots(q, k, v, state, by, slots)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    feature_map: str = "identity",
    theta: float | Tensor = 0.0,
    gamma: Rates = 1.0,
    log_decay: Tensor | None = None,
    raised: bool = False,
    normaliser: str = "sum",
    rule: str = "clamp",
    eps: float = 1e-6,
    scale: float = 1.0,
) -> Tensor:
    """One token of `linear_attention_with_state`; `state` is updated in place.

    Args:
        q, k, v: `[B, H, 1, D]`, `[B, H_kv, 1, D]`, `[B, H_kv, 1, V]`.
        state: from `linear_attention_with_state`. Its tensors are changed.
        log_decay: `[B, H_kv, 1]`.
        others: as in `linear_attention_with_state`; the feature map by its name.

    Returns:
        `[B, H, 1, V]`. For inference: gradients go through `linear_attention_with_state`.

    >>> q, k, v = torch.randn(3, 1, 8, 1, 64)
    >>> empty = torch.empty(1, 8, 0, 64)
    >>> _, state = linear_attention_with_state(empty, empty, empty, feature_map="1+elu")
    >>> linear_attention_step(q, k, v, state, feature_map="1+elu").shape
    torch.Size([1, 8, 1, 64])
    """
    q, k, v = _one_token(q, k, v)
    given = Arguments(
        feature_map, True, theta, as_numbers(gamma), log_decay, raised, normaliser, rule, eps, scale
    )
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    check_arguments(given)
    by = recurrence(k, given)
    check_goes_on(state, k, v, given)
    _check_gate(log_decay, q)
    check_eps(eps, state.key_value.dtype)
    _refuse_gradients(state, q, k, v, gamma, log_decay)
    with full_precision(q):
        return take_step(q, k, v, state, by)


def recurrence(k: Tensor, given: Arguments) -> Recurrence:
    """What a step of `linear_attention_step` computes for keys such as k `[B, H_kv, 1, D]`."""
    rates = log_rates(as_numbers(given.gamma), k, k)
    assert isinstance(given.feature_map, str)
    return Recurrence(
        angles(given.theta, k, k),
        kind_of(given.theta, raised=given.raised),
        given.feature_map,
        given.rule if given.normaliser == "sum" else "none",
        given.eps,
        given.scale,
        None if rates is None else rates.exp()[..., 0],
        given.log_decay,
    )


def _check_gate(log_decay: Tensor | None, q: Tensor) -> None:
    """Refuse numbers that are no logarithms of decays; `check_gates_go_on` has seen their shape."""
    if log_decay is None:
        return
    check_gates(log_decay, q)
    require_all(log_decay <= 0, GATE_RULE, log_decay)


def take_step(q: Tensor, k: Tensor, v: Tensor, state: State, by: Recurrence) -> Tensor:
    """One token `[B, H, 1, ·]` of a stream, for callers that have checked it."""
    served = by.is_cosformer and state.per_token == (by.log_decay is not None)
    if on_gpu(q) and served and why_not_step(q, v, state) is None:
        with on_device_of(q):
            return fused_step(
                q, k, v, state, by.theta, None, by.eps,
                limit=None, decay=by.decay, log_decay=by.log_decay,
            )  # fmt: skip
    return _by_torch(q, k, v, state, by)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, state: State, by: Recurrence) -> Tensor:
    dtype = state.key_value.dtype
    batch, heads, *_, value_width = state.key_value.shape
    phi, divides = FEATURE_MAPS[by.feature_map].forward, by.rule != "none"
    position = state.position.to(torch.float64).reshape(-1, 1)
    psi = basis(position, by.theta, by.weight, dtype)  # [b, h, 1, R]
    keys = psi.mT * phi(k.to(dtype))  # [B, H, R, D]
    queries = phi(q.to(dtype)).unflatten(1, (heads, -1))[:, :, :, 0]  # [B, H, groups, D]
    left = by.left
    if left is not None:
        left = left[..., None, None].to(dtype)  # [b, h, 1, 1]
        state.key_sum.mul_(left)
        state.key_value.mul_(left[..., None])
    if isinstance(state.log_decay, Tensor) and by.log_decay is not None:
        state.log_decay.add_(by.log_decay[..., 0].double().clamp(min=least_gate(dtype)))
    state.key_value.addcmul_(keys[..., None], v.to(dtype)[:, :, :, None])
    state.position.add_(1)
    read = (queries[:, :, :, None] * psi[:, :, :, :, None]).flatten(3)  # [B, H, groups, R·D]
    raised = by.weight == "raised_cosine"
    read = read / 2 if raised else read  # the weights are half of ψ(i)·ψ(j)
    out = read @ state.key_value.flatten(2, 3)  # [B, H, groups, V]
    if divides:
        state.key_sum.add_(keys)
        total = read @ state.key_sum.flatten(2)[..., None]
        mass = queries @ state.key_sum[:, :, 0, :, None] if raised else None
        out = out / divisor(total, by.rule, by.eps, mass)
    else:
        out = out * by.scale
    return out.reshape(batch, q.shape[1], 1, value_width).to(q.dtype)


def _in_slots(
    q: Tensor, k: Tensor, v: Tensor, state: State, by: Recurrence, slots: Tensor
) -> Tensor:
    """A step of some streams of a larger state: copy them out, step, copy them back."""
    real = slots >= 0
    chosen = slots[real]
    key_value, key_sum, position, *total = (x[chosen] for x in state.tensors)
    taken = state._replace(key_value=key_value, key_sum=key_sum, position=position)
    if total:
        taken = taken._replace(log_decay=total[0])
    if by.log_decay is not None:
        by = by._replace(log_decay=by.log_decay[real])
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    out[real] = _by_torch(q[real], k[real], v[real], taken, by)
    for mine, moved in zip(state.tensors, taken.tensors, strict=True):
        mine[chosen] = moved
    return out


def _one_token(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = check_inputs(q, k, v)
    if q.shape[2] != 1 or k.shape[2] != 1:
        raise ValueError(f"step takes one token, got {q.shape[2]} queries and {k.shape[2]} keys")
    return q, k, v


def _check_mapped(state: State, *tokens: Tensor | None) -> None:
    """Refuse tokens under vmap whose state is not mapped over, because it has room for one."""
    if any(map(mapped_over, tokens)) and not mapped_over(getattr(state, "key_value", None)):
        raise ValueError(
            "state must be mapped over by vmap, as its tokens are, because step changes it in "
            "place: attention_with_state makes a new one"
        )


def _refuse_gradients(state: State, *given: Any) -> None:
    every = (*given, state.key_value, state.decay, state.log_decay)
    tensors = (x for x in every if isinstance(x, Tensor))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            "step records no gradients: use attention_with_state, or torch.no_grad() around it"
        )


def _positions(state: State, slots: Tensor | None, *, captured: bool) -> Tensor:
    """The positions of the streams that take a token; the same read checks slots on a GPU."""
    if slots is None:
        return state.position
    streams = state.key_value.shape[0]
    here = state.position[slots.clamp(0, streams - 1)].where(slots >= 0, 0)
    if slots.is_cpu or captured or not slots.numel() or not readable(slots):
        return here
    highest, furthest = torch.stack([slots.max(), here.max()]).tolist()
    _check_highest(highest, streams)
    return torch.tensor(furthest, device="cpu")


def _check_highest(slot: int, streams: int) -> None:
    if slot >= streams:
        raise ValueError(f"slots must be below {streams}, got {slot}")


def _check_slots(slots: Tensor | None, k: Tensor, state: State) -> None:
    if slots is None:
        return
    check_tensor("slots", slots)
    if slots.shape != k.shape[:1] or slots.dtype != torch.int64 or slots.device != k.device:
        raise ValueError(
            f"slots must be int64 [{k.shape[0]}] on {k.device}, "
            f"got {slots.dtype} {list(slots.shape)} on {slots.device}"
        )
    if not isinstance(state, State) or state.position.dim() != 1:
        raise ValueError("slots need a state with one position per stream, got one for all")
    if slots.is_cpu and slots.numel():  # a look at those of a GPU would wait for it
        streams, real = state.key_value.shape[0], slots[slots >= 0]
        _check_highest(int(slots.max()), streams)
        if real.unique().numel() != real.numel():
            raise ValueError(f"slots must differ from each other, got {slots.tolist()}")


class StepGraph:
    """`step` on tensors of one shape, captured once and replayed: no host work between kernels.

    >>> state = State.empty(8, 16, 64, 64, horizon=4096, device="cuda")       # doctest: +SKIP
    >>> graph = StepGraph(*torch.randn(3, 8, 16, 1, 64, device="cuda"), state)  # doctest: +SKIP
    >>> out = graph(q, k, v)                                                    # doctest: +SKIP

    Inputs are copied into the tensors that were captured, and `out` is the captured output: the
    next call overwrites it. Past the horizon the device stops with an error, as in any graph.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        log_decay: Tensor | None = None,
        slots: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "slots": slots}
        for name, x in given.items():
            if x is not None or name in ("q", "k", "v"):
                check_tensor(name, x)
        if not isinstance(state, State):
            raise TypeError(f"state must be a State, got {type(state).__name__}")
        if not q.is_cuda:
            raise ValueError(f"q must be on a CUDA device, got {q.device.type}")
        self.state = state  # a replay writes to its memory
        q, k, v = self.inputs = (q.detach().clone(), k.detach().clone(), v.detach().clone())
        self.slots = None if slots is None else slots.clone()
        self.log_decay = None if log_decay is None else log_decay.detach().clone()
        also: dict[str, Any] = {"log_decay": self.log_decay, "slots": self.slots, "eps": eps}
        saved = [x.clone() for x in state.tensors]
        with torch.no_grad(), torch.cuda.device(q.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles the kernels, which a capture may not
                step(q, k, v, state, **also)
            torch.cuda.current_stream().wait_stream(side)
            for now, before in zip(state.tensors, saved, strict=True):
                now.copy_(before)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = step(q, k, v, state, **also)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        """The next token; `slots` and `log_decay` only if the graph was captured with some."""
        given = {"q": q, "k": k, "v": v, "slots": slots, "log_decay": log_decay}
        captured = (*self.inputs, self.slots, self.log_decay)
        copy_like(dict(zip(given, captured, strict=True)), given)
        self.graph.replay()
        return self.out


def copy_like(captured: dict[str, Tensor | None], given: dict[str, Tensor | None]) -> None:
    """Copy the tensors given by name into those that a graph has captured, all of them or none."""
    pairs = []
    for name, mine in captured.items():
        theirs = given[name]
        if theirs is None or mine is None:
            if theirs is not mine:
                raise ValueError(
                    f"{name} must be given with every call, or not at all, as when captured"
                )
            continue
        check_tensor(name, theirs)
        for what in ("shape", "dtype", "device"):
            wanted, found = getattr(mine, what), getattr(theirs, what)
            if wanted != found:
                raise ValueError(f"{name} must have the {what} captured, {wanted}, got {found}")
        pairs.append((mine, theirs))
    for mine, theirs in pairs:
        mine.copy_(theirs.detach())
