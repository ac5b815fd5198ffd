"""Features 1 + elu under rotary positions, and their gradients: one read, one write."""

import triton
import triton.language as tl

from cosformer.ops.sine_kernels import TURN, sine_and_cosine_of_turns


@triton.jit(do_not_specialize=["blocks", "groups", "length", "heads", "start_b"])
def rotation_kernel(
    x,
    grad,  # of the turned features
    start,  # [1] or [B] int64: where the first token stands
    out,  # [B, H, T, D]: the turned features, or with BACK the gradient of x
    blocks, groups, length, heads, start_b,
    x_b, x_h, x_t, x_d, grad_b, grad_h, grad_t,
    D: tl.constexpr, LOG_BASE: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
    BLOCK_T: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A block of tokens in `HEADS` heads, which share its angles."""
    program = tl.program_id(0).to(tl.int64)
    token = (program % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    first_head = (program // blocks % groups) * HEADS
    batch = program // blocks // groups
    position = (tl.load(start + batch * start_b) + token).to(tl.float64)
    pair = tl.arange(0, PAIRS).to(tl.float64)
    turns = position[:, None] * tl.exp2(pair * (-2.0 * LOG_BASE / D))[None, :] / TURN
    sin, cos = sine_and_cosine_of_turns(turns)
    lane = tl.arange(0, 2 * PAIRS)
    inside = (token[:, None] < length) & (lane[None, :] < D)
    for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
        rows = tl.load(
            x + batch * x_b + head * x_h + token[:, None] * x_t + lane[None, :] * x_d,
            mask=inside, other=0.0,
        ).to(tl.float32)  # fmt: skip
        slope = tl.exp(tl.where(rows > 0, 0.0, rows))  # NaN stays
        if BACK:
            cells = grad + batch * grad_b + head * grad_h + token[:, None] * grad_t + lane[None, :]
            given = tl.load(cells, mask=inside, other=0.0).to(tl.float32)
            even, odd = tl.split(tl.reshape(given, (BLOCK_T, PAIRS, 2)))
            found = tl.interleave(even * cos + odd * sin, odd * cos - even * sin) * slope
        else:
            even, odd = tl.split(tl.reshape(tl.maximum(rows, 0.0) + slope, (BLOCK_T, PAIRS, 2)))
            found = tl.interleave(even * cos - odd * sin, even * sin + odd * cos)
        cells = out + ((batch * heads + head) * length + token[:, None]) * D + lane[None, :]
        tl.store(cells, found.to(out.dtype.element_ty), mask=inside)
