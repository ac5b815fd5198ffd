"""The launch that ends a greedy step."""

import torch
from torch import Tensor

from cosformer.ops.triton.rows import early_launch
from cosformer.runtime import HAS_TRITON, on_gpu

BLOCK = 8192
"""Logits that a program compares at a time."""
AT_ONCE = 4
"""Blocks of logits that a program loads together: there are few programs, so loads must not wait
for one another."""


def likeliest_serves(weight: Tensor) -> bool:
    """Whether the kernel takes logits by such a weight, `[vocabulary, width]`."""
    small = weight.dtype != torch.float64 and len(weight) < 2**31 - BLOCK * AT_ONCE
    return HAS_TRITON and on_gpu(weight) and small


def take_likeliest(
    logits: Tensor,
    chosen: Tensor,
    token: Tensor,
    *,
    drawn: Tensor,
    length: Tensor,
    position: Tensor,
    room: int | None,
) -> None:
    """Write the likeliest token of each row of logits `[B, V]`, and count it, by one kernel.

    Args:
        chosen: `[B, ahead]` int64, where the token goes into the column `length` modulo ahead;
            -1 where logits are not finite.
        token: `[B]` int64, for the same token, or 0 where logits are not finite.
        drawn, length, position: `[B]` int64 each, to be increased: how many tokens were drawn, and
            how many there are so far, with padding and without. The position stays below `room`,
            if that is given.
    """
    from cosformer.ops.triton.kernels.likeliest import likeliest_kernel

    likeliest_kernel[(len(logits),)](
        logits, chosen, token, drawn, length, position,
        logits.shape[1], logits.stride(0), chosen.stride(0), room or 0,
        AHEAD=chosen.shape[1], BLOCK=BLOCK, AT_ONCE=AT_ONCE, ROOM=room is not None,
        num_warps=32, **early_launch(logits),
    )  # fmt: skip
