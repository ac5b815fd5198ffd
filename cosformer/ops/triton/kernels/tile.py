"""Loads, stores and element-wise arithmetic on the tiles that kernels multiply."""

import triton
import triton.language as tl

LOG_E = tl.constexpr(1.4426950408889634)  # log₂ e: the exponential of a GPU is to base 2
ROWS = tl.constexpr(16)
"""Rows of the matrix by which tensor cores read vectors; the head of `sweep.py` explains it."""


@triton.jit
def relu(x):
    """max(x, 0); NaN stays NaN. bfloat16 in pairs, since Triton would convert single ones."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0; max.NaN.bf16x2 $0, $1, z; }",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(x <= 0, 0.0, x)


@triton.jit
def hidden(tile, real):
    """The tile with zeros in rows that are not real, even if those hold NaN."""
    return tl.where(real[:, None], tile, 0.0).to(tile.dtype)


@triton.jit
def apart(column, stride):
    """The offset of each column in a row.

    In rows that are in one piece the stride is 1, and Triton makes a constant of that. With any
    other stride an offset may be too large for 32 bits.
    """
    if isinstance(stride, int):
        return column * stride
    else:
        return column.to(tl.int64) * stride


@triton.jit
def load_rows(rows, index, column, stride, column_stride, valid, width, FULL: tl.constexpr):
    """A tile [C, W] of rows, with zeros beyond the segment and the width.

    float16 becomes float32, which is then multiplied as tf32: no bit of it is lost, and sums do not
    overflow.
    """
    pointers = rows + index[:, None] * stride + apart(column, column_stride)[None, :]
    if FULL:
        tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=valid[:, None] & (column[None, :] < width), other=0.0)
    if tile.dtype == tl.float16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def load_each(pointers, step, mask, R: tl.constexpr):
    """R tiles or vectors that lie `step` apart in memory."""
    found = ()
    for r in tl.static_range(R):
        found += (tl.load(pointers + r * step, mask=mask, other=0.0),)
    return found


@triton.jit
def store_each(pointers, step, tiles, mask, R: tl.constexpr):
    """Stores R tiles or vectors `step` apart in memory."""
    for r in tl.static_range(R):
        tl.store(pointers + r * step, tiles[r], mask=mask)


@triton.jit
def times(rows, factor, R: tl.constexpr):
    """Each of R vectors times a factor."""
    found = ()
    for r in tl.static_range(R):
        found += (rows[r] * factor,)
    return found


@triton.jit
def denominator(total, eps, RULE: tl.constexpr):
    """The denominator D of a row's total; NaN stays NaN."""
    if RULE == "add":
        return total + eps
    elif RULE == "clamp":
        return tl.where(total < eps, eps, total)
    else:
        return tl.where(tl.abs(total) < eps, tl.where(total < 0, -eps, eps), total)


@triton.jit
def through_denominator(slope, total, eps, RULE: tl.constexpr):
    """The gradient of `total`, where `slope` is the gradient of its denominator."""
    if RULE == "clamp":
        return tl.where(total > eps, slope, 0.0)
    elif RULE == "signed":
        return tl.where(tl.abs(total) > eps, slope, 0.0)
    else:
        return slope
