"""One token of many streams by one small kernel."""

import struct

import torch
from torch import Tensor

from cosformer.ops.problem import per_head
from cosformer.ops.state import State
from cosformer.ops.triton.passes import INTERPRETED, MAX_WIDTH
from cosformer.ops.triton.tiles import padded
from cosformer.runtime import HAS_TRITON


def why_not_step(q: Tensor, v: Tensor, state: State) -> str | None:
    """What the step's kernel needs and does not get; None if it can take the step."""
    if not HAS_TRITON:
        return "the package triton"
    if not (q.is_cuda or INTERPRETED):
        return f"tensors on a CUDA device, got {q.device.type}"
    if torch.compiler.is_compiling():
        return "an eager call"
    if torch.float64 in (q.dtype, state.key_value.dtype):
        return "float32 or less, got float64"
    if state.weight == "raised_cosine":
        return "cosine or plain weights, got raised_cosine"
    if state.per_token and state.rate is not None:
        return "a state with one kind of decay, got one that decays per head and per token"
    if max(q.shape[3], v.shape[3]) > MAX_WIDTH:
        return f"widths up to {MAX_WIDTH}, got {q.shape[3]} and {v.shape[3]}"
    return None


def fused_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    theta: Tensor | float,
    slots: Tensor | None,
    eps: float,
    *,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    limit: int | None,
) -> Tensor:
    """`step` on checked tensors `[B, H, 1, ·]`. `limit`: a horizon that the device must check.

    `decay` is γ, `[1, H_kv or 1]`, or else `log_decay` that of the tokens, `[B, H_kv, 1]`.

    One launch: a program has all columns of a head, so nobody else reads the key sums it changes.
    `theta` as a number spares the launch that a tensor of it takes.
    """
    from cosformer.ops.triton.kernels.step import step_kernel

    key_value, key_sum, position, *total = state.tensors
    batch, heads, _, width = k.shape
    value_width = v.shape[3]
    out = q.new_empty(batch, q.shape[1], 1, value_width)
    turn = theta.reshape(-1).contiguous() if isinstance(theta, Tensor) else _bits(theta)
    turns = turn.numel() if isinstance(turn, Tensor) else 0
    apart = position.stride(0) if position.dim() else 0
    rows = padded(width)
    columns = min(padded(value_width), max(32, 4096 // rows))
    if not batch:
        if slots is None:
            position.add_(1)
        return out
    fade, how = position, ""  # a pointer that is never followed
    if log_decay is not None:
        fade, how = log_decay[..., 0], "token"
    elif decay is not None:
        fade, how = decay, "head"
    faded = total[0] if how == "token" else position
    step_kernel[(batch * heads,)](
        q, k, v, out, key_value, key_sum, position, turn, position if slots is None else slots,
        fade, faded, 0 if limit is None else limit, heads, q.shape[1] // heads, eps,
        apart, int(turns > 1), *(per_head(fade) if how else (0, 0)),
        *(faded.stride() if how == "token" else (0, 0)),
        *_without_length(q), *_without_length(k), *_without_length(v), *_without_length(out),
        *key_value.stride(), *key_sum.stride(),
        K=width, V=value_width, BLOCK_K=rows, BLOCK_V=columns, R=key_value.shape[2],
        SLOTS=slots is not None, SHARED=slots is None and not apart,
        CHECKED=limit is not None, NUMBER=not turns, FADE=how,
        # 16 cells of a state per thread: all its loads are in flight at once, and the registers
        # still leave room for a second program, whose loads overlap the stores of the first.
        num_warps=min(8, max(1, rows * columns // 512)),
    )  # fmt: skip
    return out


def _without_length(rows: Tensor) -> tuple[int, int, int]:
    batch, head, _, lane = rows.stride()
    return batch, head, lane


def _bits(number: float) -> int:
    """A float64 as an integer: Triton would round a float argument to float32."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
