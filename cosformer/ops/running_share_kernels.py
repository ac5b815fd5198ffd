"""Kernels of `running_share.py`: a program has some columns, and a tile of rows at a time."""

import triton
import triton.language as tl


@triton.jit
def _joined(level, total, other_level, other_total):
    """Of two sums exp(level) · total, as one such product."""
    top = tl.maximum(level, other_level)
    return top, total * tl.exp(level - top) + other_total * tl.exp(other_level - top)


@triton.jit
def _after(early_fall, early, late_fall, late):
    """Of S ← exp(fall) · S + g twice, as one such step; a product of many would be less exact."""
    return early_fall + late_fall, tl.exp(late_fall) * early + late


@triton.jit
def _last(x, ROWS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == ROWS - 1, x, 0.0), 0)


@triton.jit
def _columns(size, groups, COLUMNS: tl.constexpr):
    """Where the matrix of this program begins in memory, its first column, and all of them."""
    matrix = (tl.program_id(0) // groups).to(tl.int64)
    first = tl.program_id(0) % groups * COLUMNS
    return matrix * size * size, first, first + tl.arange(0, COLUMNS)


@triton.jit
def cells_of(row, column, size):
    """Where a matrix has them; in 64 bits, since one of 46,341 rows has more than 2³¹ cells."""
    return row[:, None].to(tl.int64) * size + column[None, :]


@triton.jit
def _fill(out, value, low, high, column, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows from `low` to `high` of the columns."""
    for first in range(low, high, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row[:, None] < high) & (column[None, :] < size)
        values = tl.full((ROWS, COLUMNS), value, tl.float32)
        tl.store(out + cells_of(row, column, size), values, mask=there)


@triton.jit(do_not_specialize=["groups"])
def share_kernel(
    x,  # [matrices, size, size]
    share,
    sums,  # log Σ_{t ≤ i} exp(x_tj)
    size, groups,
    LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x_ij − log Σ_{t ≤ i} exp(x_tj), from the first row down."""
    base, begin, column = _columns(size, groups, COLUMNS)
    _fill(share + base, LOWEST, 0, begin, column, size, ROWS, COLUMNS)
    top, total = tl.full((COLUMNS,), LOWEST, tl.float32), tl.zeros((COLUMNS,), tl.float32)
    ones = tl.full((ROWS, COLUMNS), 1.0, tl.float32)
    for first in range(begin, size, ROWS):
        row = first + tl.arange(0, ROWS)
        cells = base + cells_of(row, column, size)
        there = (row[:, None] < size) & (column[None, :] < size)
        seen = there & (column[None, :] <= row[:, None])
        value = tl.load(x + cells, mask=seen, other=LOWEST)
        levels, totals = tl.associative_scan((value, ones), 0, _joined)
        levels, totals = _joined(top[None, :], total[None, :], levels, totals)
        found = levels + tl.log(totals)
        tl.store(share + cells, tl.where(seen, value - found, LOWEST), mask=there)
        tl.store(sums + cells, found, mask=there)
        top, total = _last(levels, ROWS), _last(totals, ROWS)


@triton.jit(do_not_specialize=["groups"])
def slope_kernel(
    x,  # [matrices, size, size]
    sums,
    grad,  # of the shares
    slope,  # of x
    size, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """g_t − exp(x_t − y_t) S_t, S_t = Σ_{i ≥ t} g_i exp(y_t − y_i), y the sums, from below."""
    base, begin, column = _columns(size, groups, COLUMNS)
    _fill(slope + base, 0.0, 0, begin, column, size, ROWS, COLUMNS)
    later = tl.zeros((COLUMNS,), tl.float32)
    for done in range(0, size - begin, ROWS):
        row = size - 1 - done - tl.arange(0, ROWS)  # a scan goes down this list
        cells = base + cells_of(row, column, size)
        there = (row[:, None] >= begin) & (column[None, :] < size)
        seen = there & (column[None, :] <= row[:, None])
        below = seen & (row[:, None] + 1 < size)
        level = tl.load(sums + cells, mask=seen, other=0.0)
        share = tl.load(x + cells, mask=seen, other=0.0) - level
        fall = level - tl.load(sums + cells + size, mask=below, other=float("inf"))
        given = tl.load(grad + cells, mask=seen, other=0.0)
        falls, own = tl.associative_scan((fall, given), 0, _after)
        total = own + tl.exp(falls) * later[None, :]
        found = tl.where(seen, given - tl.exp(share) * total, 0.0)
        tl.store(slope + cells, found, mask=there)
        later = _last(total, ROWS)
