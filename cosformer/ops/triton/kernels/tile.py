"""What kernels do with tiles of rows before they multiply them."""

import triton
import triton.language as tl

LOG_E = tl.constexpr(1.4426950408889634)  # to base 2, which a GPU's exponentials have
ROWS = tl.constexpr(16)
"""Of products that read vectors: 4·s + r belongs to ψ_r, as `triton/kernels/sweep.py` has it."""


@triton.jit
def relu(x):
    """max(x, 0), NaN kept. Two bfloat16 at a time: alone they would go through float32."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0; max.NaN.bf16x2 $0, $1, z; }",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(x <= 0, 0.0, x)


@triton.jit
def hidden(tile, real):
    """A tile without the rows that are not real, whatever they hold."""
    return tl.where(real[:, None], tile, 0.0).to(tile.dtype)


@triton.jit
def apart(column, stride):
    """Where columns lie in a row. Rows in one piece have a stride of 1, which Triton knows as a
    constant; any other stride may lead beyond what 32 bits count."""
    if isinstance(stride, int):
        return column * stride
    else:
        return column.to(tl.int64) * stride


@triton.jit
def load_rows(rows, index, column, stride, column_stride, valid, width, FULL: tl.constexpr):
    """A tile [C, W] of rows; zeros beyond the segment and the width.

    float16 becomes float32, multiplied as tf32: as precise, and sums do not overflow.
    """
    places = rows + index[:, None] * stride + apart(column, column_stride)[None, :]
    if FULL:
        tile = tl.load(places, mask=valid[:, None], other=0.0)
    else:
        tile = tl.load(places, mask=valid[:, None] & (column[None, :] < width), other=0.0)
    if tile.dtype == tl.float16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def load_each(places, apart, mask, R: tl.constexpr):
    """R tiles or vectors, `apart` in memory."""
    found = ()
    for r in tl.static_range(R):
        found += (tl.load(places + r * apart, mask=mask, other=0.0),)
    return found


@triton.jit
def store_each(places, apart, tiles, mask, R: tl.constexpr):
    for r in tl.static_range(R):
        tl.store(places + r * apart, tiles[r], mask=mask)


@triton.jit
def times(rows, factor, R: tl.constexpr):
    """Each of R vectors by a factor."""
    found = ()
    for r in tl.static_range(R):
        found += (rows[r] * factor,)
    return found


@triton.jit
def denominator(total, eps, RULE: tl.constexpr):
    """What sums are divided by; NaN stays."""
    if RULE == "add":
        return total + eps
    elif RULE == "clamp":
        return tl.where(total < eps, eps, total)
    else:
        return tl.where(tl.abs(total) < eps, tl.where(total < 0, -eps, eps), total)


@triton.jit
def through_denominator(slope, total, eps, RULE: tl.constexpr):
    """The gradient of `total`, of that of its denominator."""
    if RULE == "clamp":
        return tl.where(total > eps, slope, 0.0)
    elif RULE == "signed":
        return tl.where(tl.abs(total) > eps, slope, 0.0)
    else:
        return slope
