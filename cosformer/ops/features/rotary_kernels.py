"""Features 1 + elu under rotary positions, and their gradients: one read, one write."""

import triton
import triton.language as tl

from cosformer.ops.sine_kernels import waves_of_turns
from cosformer.ops.triton.kernels.tile import LOG_E

LOG_TURN = tl.constexpr(2.651496129472319)  # of 2π to base 2


@triton.jit
def angles(
    position, D: tl.constexpr, LOG_BASE: tl.constexpr, ROUGH: tl.constexpr, PAIRS: tl.constexpr
):
    """Sines and cosines of the angles that pairs are turned by, `[T, PAIRS]`."""
    pair = tl.arange(0, PAIRS).to(tl.float64)
    rate = tl.exp2(pair * (-2.0 * LOG_BASE / D) - LOG_TURN)
    return waves_of_turns(position.to(tl.float64)[:, None] * rate[None, :], ROUGH)


@triton.jit
def turned(x, sin, cos):
    """Pairs of columns turned by an angle; with −sin they are turned back."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.interleave(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def float_rows(x, token, lane, x_t, x_d, inside, other):
    """Rows of tokens in float32."""
    cells = x + token[:, None] * x_t + lane[None, :] * x_d
    return tl.load(cells, mask=inside, other=other).to(tl.float32)


@triton.jit
def features(x, token, lane, x_t, x_d, inside):
    """1 + elu of rows of tokens and its slope, both 0 outside; NaN stays."""
    rows = float_rows(x, token, lane, x_t, x_d, inside, float("-inf"))
    slope = tl.exp2(tl.minimum(rows, 0.0, propagate_nan=tl.PropagateNan.ALL) * LOG_E)
    return tl.maximum(rows, 0.0) + slope, slope


@triton.jit(do_not_specialize=["blocks", "groups", "length", "heads", "start_b"])
def rotation_kernel(
    x,
    grad,  # of the turned features
    start,  # [1] or [B] int64: where the first token stands
    out,  # [B, H, T, D]: the turned features, or with BACK the gradient of x
    blocks, groups, length, heads, start_b,
    x_b, x_h, x_t, x_d, grad_b, grad_h, grad_t,
    D: tl.constexpr, LOG_BASE: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
    ROUGH: tl.constexpr, BLOCK_T: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A block of tokens in `HEADS` heads, which share its angles."""
    program = tl.program_id(0).to(tl.int64)
    token = (program % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    first_head = (program // blocks % groups) * HEADS
    batch = program // blocks // groups
    sin, cos = angles(tl.load(start + batch * start_b) + token, D, LOG_BASE, ROUGH, PAIRS)
    lane = tl.arange(0, 2 * PAIRS)
    inside = (token[:, None] < length) & (lane[None, :] < D)
    for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
        phi, slope = features(x + batch * x_b + head * x_h, token, lane, x_t, x_d, inside)
        if BACK:
            cells = grad + batch * grad_b + head * grad_h
            given = float_rows(cells, token, lane, grad_t, 1, inside, 0.0)
            found = turned(given, -sin, cos) * slope
        else:
            found = turned(phi, sin, cos)
        cells = out + ((batch * heads + head) * length + token[:, None]) * D + lane[None, :]
        tl.store(cells, found.to(out.dtype.element_ty), mask=inside)
