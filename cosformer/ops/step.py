"""One token of a stream: constant time, constant memory, the state changed where it stands."""

import math

import torch
from torch import Tensor

from cosformer.check import check_choice, check_eps, check_inputs, check_tensor
from cosformer.ops.problem.arguments import angle_of
from cosformer.ops.problem.features import FEATURE_MAPS
from cosformer.ops.problem.normaliser import denominator
from cosformer.ops.problem.problem import basis
from cosformer.ops.problem.weights import Rates, angles, is_decaying, kind_of
from cosformer.ops.state import State, check_continues, check_length, whole_limit
from cosformer.runtime import HAS_TRITON, full_precision, on_device_of, readable


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    slots: Tensor | None = None,
    eps: float = 1e-6,
    impl: str = "auto",
) -> Tensor:
    """Attention of one new token, at a cost that does not grow; `state` is updated in place.

    Args:
        q: `[B, H, 1, D]` (or `[B, H, D]`); k and v likewise, with the heads of the state.
        state: from `State.empty` or `attention_with_state`. Its tensors are changed.
        slots: `[B]` int64, for a state of more streams than B: which one each row belongs to, no
            two the same; a negative one is padding, whose output is zero. Needs one position per
            stream: `State.empty(..., position=torch.zeros(streams, dtype=torch.int64))`. On a GPU
            two that are the same go unnoticed, and under raised cosine weights or in a graph,
            where the host looks at nothing, any slot that does not exist.
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
        return step(q, k, v, state, slots=slots, eps=eps, impl=impl)[:, :, 0]
    q, k, v = check_inputs(q, k, v)
    if q.shape[2] != 1 or k.shape[2] != 1:
        raise ValueError(f"step takes one token, got {q.shape[2]} queries and {k.shape[2]} keys")
    streams = state.key_value.shape[0] if isinstance(state, State) else 0
    _check_slots(slots, k, state)
    shown = k if slots is None else k.new_empty(()).expand(streams, *k.shape[1:])
    horizon = check_continues(state, shown, v, None, None)
    check_eps(eps)
    check_choice("impl", impl, ("auto", "chunked", "triton"))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, state.key_value)):
        raise ValueError(
            "step records no gradients: use attention_with_state, or torch.no_grad() around it"
        )
    reason = _why_not_triton(q, v, state)
    if impl == "triton" and reason:
        raise ValueError(f"impl='triton' needs {reason}: use impl='chunked'")
    kernels = impl == "triton" or (impl == "auto" and reason is None and q.is_cuda)
    limited = state.weight == "cosine"
    captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if limited and not (kernels and captured):
        check_length(1, horizon, _positions(state, slots, captured=captured))
    if kernels:
        from cosformer.ops.triton.decode import fused_step

        limit = whole_limit(horizon) if limited and captured else None
        turn = angle_of(horizon, k) if isinstance(horizon, Tensor) else math.pi / (2 * horizon)
        with on_device_of(q):
            return fused_step(q, k, v, state, turn, slots, eps, limit=limit)
    theta = angle_of(horizon, k)
    with full_precision(q):
        if slots is None:
            return _torch_step(q, k, v, state, theta, eps)
        return _torch_step_in_slots(q, k, v, state, theta, slots, eps)


def _torch_step(q: Tensor, k: Tensor, v: Tensor, state: State, theta: Tensor, eps: float) -> Tensor:
    dtype = state.key_value.dtype
    batch, heads, *_, value_width = state.key_value.shape
    position = state.position.to(torch.float64).reshape(-1, 1)
    psi = basis(position, theta, state.weight, dtype)  # [b, h, 1, R]
    keys = psi.mT * k.to(dtype).relu()  # [B, H, R, D]
    queries = q.to(dtype).relu().unflatten(1, (heads, -1))[:, :, :, 0]  # [B, H, groups, D]
    queries = (queries[:, :, :, None] * psi[:, :, :, :, None]).flatten(3)  # [B, H, groups, R·D]
    state.key_sum.add_(keys)
    state.key_value.addcmul_(keys[..., None], v.to(dtype)[:, :, :, None])
    state.position.add_(1)
    total = (queries @ state.key_sum.flatten(2)[..., None]).clamp(min=eps)
    out = queries @ state.key_value.flatten(2, 3) / total  # [B, H, groups, V]
    return out.reshape(batch, q.shape[1], 1, value_width).to(q.dtype)


def _torch_step_in_slots(
    q: Tensor, k: Tensor, v: Tensor, state: State, theta: Tensor, slots: Tensor, eps: float
) -> Tensor:
    """The streams taken out, moved on by one token, and put back."""
    real = slots >= 0
    chosen = slots[real]
    key_value, key_sum, position = (x[chosen] for x in state[:3])
    taken = State(key_value, key_sum, position, state.horizon)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    out[real] = _torch_step(q[real], k[real], v[real], taken, theta, eps)
    for mine, moved in zip(state[:3], taken[:3], strict=True):
        mine[chosen] = moved
    return out


def _positions(state: State, slots: Tensor | None, *, captured: bool) -> Tensor:
    """Where the streams that take a token stand; slots on a GPU are checked by the same look."""
    if slots is None:
        return state.position
    streams = state.key_value.shape[0]
    here = state.position[slots.clamp(0, streams - 1)].where(slots >= 0, 0)
    if slots.is_cpu or captured or not slots.numel() or not readable(slots):
        return here
    highest, furthest = torch.stack([slots.max(), here.max()]).tolist()
    _check_highest(highest, streams)
    return torch.tensor(furthest)


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


def _why_not_triton(q: Tensor, v: Tensor, state: State) -> str | None:
    """What the step's kernels need and do not get."""
    from cosformer.ops.triton.operators import INTERPRETED, MAX_WIDTH

    if not HAS_TRITON:
        return "the package triton"
    if not (q.is_cuda or INTERPRETED):
        return f"tensors on a CUDA device, got {q.device.type}"
    if torch.compiler.is_compiling():
        return "an eager call"
    if torch.float64 in (q.dtype, state.key_value.dtype):
        return "float32 or less, got float64"
    if max(q.shape[3], v.shape[3]) > MAX_WIDTH:
        return f"widths up to {MAX_WIDTH}, got {q.shape[3]} and {v.shape[3]}"
    return None


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
    """One token of a stream of the linear family; `state` is changed in place."""
    dtype = state.key_value.dtype
    batch, heads, *_, columns = state.key_value.shape
    weight = kind_of(theta, raised=raised)
    position = state.position.to(torch.float64).reshape(-1, 1)
    psi = basis(position, angles(theta, q, k), weight, dtype)
    phi = FEATURE_MAPS[feature_map].forward
    keys = psi.mT * phi(k.to(dtype), None)
    queries = phi(q.to(dtype), None).unflatten(1, (heads, -1))[:, :, :, 0]
    queries = (queries[:, :, :, None] * psi[:, :, :, :, None]).flatten(3)
    kept = None
    if is_decaying(gamma, None):
        kept = torch.as_tensor(gamma, dtype=dtype, device=k.device).reshape(1, -1, 1, 1)
    if log_decay is not None:
        kept = log_decay.to(dtype).exp()[..., None] * (1 if kept is None else kept)
    if kept is not None:
        state.key_sum.mul_(kept)
        state.key_value.mul_(kept[..., None])
    if normaliser == "sum":
        state.key_sum.add_(keys)
    state.key_value.addcmul_(keys[..., None], v.to(dtype)[:, :, :, None])
    state.position.add_(1)
    out = queries @ state.key_value.flatten(2, 3) * scale
    if normaliser == "sum":
        out = out / denominator(queries @ state.key_sum.flatten(2)[..., None], rule, eps)
    return out.reshape(batch, q.shape[1], 1, columns).to(q.dtype)
