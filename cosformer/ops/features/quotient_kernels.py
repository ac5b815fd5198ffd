"""Sums of several parts divided by their totals, and the gradient: one read, one write."""

import triton
import triton.language as tl

from cosformer.ops.triton.kernels.tile import denominator, through_denominator


@triton.jit(do_not_specialize=["rows"])
def quotient_kernel(
    above,  # a tuple of [rows, ABOVE]: what its first V columns sum to is divided
    below,  # a tuple of [rows, BELOW]: by the sum of column AT
    out,  # [rows, V]
    total,  # [rows] float32
    rows, eps,
    V: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr, AT: tl.constexpr,
    RULE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_V)
    there = row < rows
    inside = there[:, None] & (column[None, :] < V)
    sums = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    summed = tl.zeros([BLOCK_T], tl.float32)
    for part in tl.static_range(len(above)):
        cells = above[part] + row[:, None] * ABOVE + column[None, :]
        sums += tl.load(cells, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(below[part] + row * BELOW + AT, mask=there, other=1.0)
        summed += weights.to(tl.float32)
    found = sums / denominator(summed, eps, RULE)[:, None]
    cells = out + row[:, None] * V + column[None, :]
    tl.store(cells, found.to(out.dtype.element_ty), mask=inside)
    tl.store(total + row, summed, mask=there)


@triton.jit(do_not_specialize=["rows"])
def quotient_gradient_kernel(
    grad, out, total,
    above,  # [rows, ABOVE]: the gradient of each part
    below,  # [rows, BELOW]
    rows, eps,
    V: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr, AT: tl.constexpr,
    RULE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Where totals lie behind sums (AT = V) both gradients are one tensor."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_V)
    there = row < rows
    inside = there[:, None] & (column[None, :] < V)
    summed = tl.load(total + row, mask=there, other=1.0)
    cells = row[:, None] * V + column[None, :]
    given = tl.load(grad + cells, mask=inside, other=0.0).to(tl.float32)
    given /= denominator(summed, eps, RULE)[:, None]
    result = tl.load(out + cells, mask=inside, other=0.0).to(tl.float32)
    slope = through_denominator(-tl.sum(given * result, 1), summed, eps, RULE)
    cells = above + row[:, None] * ABOVE + column[None, :]
    tl.store(cells, given.to(above.dtype.element_ty), mask=inside)
    other = tl.arange(0, BLOCK_B)
    wanted = there[:, None] & (other[None, :] < BELOW - AT)
    slopes = tl.where(other[None, :] == 0, slope[:, None], 0.0)
    cells = below + row[:, None] * BELOW + AT + other[None, :]
    tl.store(cells, slopes.to(below.dtype.element_ty), mask=wanted)
