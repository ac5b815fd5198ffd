"""The launch of a token's step from a layer's projections."""

import torch
from torch import Tensor

from cosformer.ops.layout import SumsStep
from cosformer.ops.state import State
from cosformer.ops.triton.passes import INTERPRETED
from cosformer.ops.triton.rows import early_launch
from cosformer.ops.triton.tiles import padded
from cosformer.runtime import HAS_TRITON

WARPS = 8
"""The most warps of a program."""
CELLS = 16384
"""Numbers of a sum of one head that a program holds at once."""


def token_serves(state: State) -> bool:
    """Whether the kernel takes such states: on a GPU, in float32, of narrow heads."""
    *_, width, value_width = state.key_value.shape
    there = HAS_TRITON and (state.key_value.is_cuda or INTERPRETED)
    small = padded(width) * padded(value_width) <= CELLS
    contiguous = state.key_value.stride(4) == 1 == state.key_sum.stride(3)
    return there and small and contiguous and state.key_value.dtype == torch.float32


def sums_token(rows: Tensor, given: SumsStep, length: Tensor) -> Tensor:
    """Heads `[B, H·V]` of rows `[B, columns]` of projections, by one kernel.

    length: `[B]` int64, how many tokens each stream has had, padding included.
    """
    from cosformer.ops.triton.kernels.token import sums_token_kernel

    layout, state, after, theta, decay, log_most, eps = given
    key_value, key_sum = state.key_value, state.key_sum
    batch, heads, states, width, value_width = key_value.shape
    out = rows.new_empty(batch, layout.heads * value_width)
    how = "token" if log_most is not None else "" if decay is None else "head"
    fade = length if decay is None else decay
    faded = state.log_decay if isinstance(state.log_decay, Tensor) else length
    block_k, block_v = padded(width), padded(value_width)
    sums_token_kernel[(batch * heads,)](
        rows, out, key_value, key_sum, length, theta, fade, faded,
        rows if after.norm is None else after.norm, heads, eps, after.eps, log_most or 0.0,
        rows.stride(0), out.stride(0), int(theta.numel() > 1), int(fade.numel() > 1),
        faded.stride(0), layout.k, layout.v, layout.gate, layout.control,
        *key_value.stride()[:4], *key_sum.stride()[:3],
        K=width, V=value_width, BLOCK_K=block_k, BLOCK_V=block_v, R=states, FADE=how,
        NORM=after.norm is not None, GATE=after.gate, GROUPS=layout.heads // heads,
        # 32 cells of a sum for each thread
        num_warps=min(WARPS, max(1, block_k * block_v // 1024)), **early_launch(rows),
    )  # fmt: skip
    return out
