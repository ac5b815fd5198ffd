"""The features of exp's Taylor series, and their gradient: one read, one write."""

import triton
import triton.language as tl

ROOT = tl.constexpr(0.7071067811865476)  # 1/√2


@triton.jit
def _rows(x, rows, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """A block of rows: their numbers, which are real, and their columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (lane < N)[None, :]
    values = tl.load(x + row[:, None] * N + lane[None, :], mask=inside, other=0.0)
    return row, lane, inside, values


@triton.jit(do_not_specialize=["rows"])
def series_kernel(
    x,  # [rows, N] float32
    out,  # [rows, P]: 1, x, x⊗x/√2, zeros
    rows,
    N: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, lane, inside, values = _rows(x, rows, N, BLOCK_T, BLOCK_N)
    out += row * P
    one = tl.full([BLOCK_T], 1.0, tl.float32).to(out.dtype.element_ty)
    tl.store(out, one, mask=row < rows)
    tl.store(out[:, None] + 1 + lane[None, :], values.to(out.dtype.element_ty), mask=inside)
    pairs = values[:, :, None] * values[:, None, :] * ROOT
    cells = out[:, None, None] + 1 + N + lane[None, :, None] * N + lane[None, None, :]
    both = inside[:, :, None] & (lane < N)[None, None, :]
    tl.store(cells, pairs.to(out.dtype.element_ty), mask=both)
    behind = 1 + N + N * N + tl.arange(0, 8)
    nothing = tl.zeros([BLOCK_T, 8], tl.float32).to(out.dtype.element_ty)
    wanted = (row < rows)[:, None] & (behind < P)[None, :]
    tl.store(out[:, None] + behind[None, :], nothing, mask=wanted)


@triton.jit(do_not_specialize=["rows"])
def series_gradient_kernel(
    x, grad, dx, rows,
    N: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, lane, inside, values = _rows(x, rows, N, BLOCK_T, BLOCK_N)
    grad += row * P
    linear = tl.load(grad[:, None] + 1 + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    cells = grad[:, None, None] + 1 + N + lane[None, :, None] * N + lane[None, None, :]
    both = inside[:, :, None] & (lane < N)[None, None, :]
    pairs = tl.load(cells, mask=both, other=0.0).to(tl.float32)
    found = tl.sum(pairs * values[:, None, :], 2) + tl.sum(pairs * values[:, :, None], 1)
    tl.store(dx + row[:, None] * N + lane[None, :], linear + found * ROOT, mask=inside)
