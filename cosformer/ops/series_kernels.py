"""The features of exp's Taylor series, and their gradient: one read of x, one write of the result.

Numbers that a feature multiplies are picked from their row by products with columns of a single 1.
A program has two warps, so that these are products by `mma`, of any width: for `wgmma`, which needs
four, Triton 3.6 reads matrices of so few columns out of range.
"""

import triton
import triton.language as tl

from cosformer.ops.triton.kernels.product import half_exact, place, rounded, split

ROOT = tl.constexpr(0.7071067811865476)  # 1/√2


@triton.jit
def _pick(rows, places, into, SPLIT: tl.constexpr):
    """`into` + rows · places, of float32 and of zeros and ones."""
    places = places.to(tl.float32)
    if SPLIT:
        places = places.to(tl.bfloat16)
        upper, rest = split(rows)
        return tl.dot(rest, places, tl.dot(upper, places, into))
    else:
        return tl.dot(rows, places, into, input_precision="tf32x3")


@triton.jit
def _firsts(N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):
    """Picks the first factors of a block of columns, `[N, C]`: the same numbers for all blocks."""
    return tl.arange(0, BLOCK_N)[:, None] == (tl.arange(0, BLOCK_C) % N)[None, :]


@triton.jit
def _seconds(column, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Picks the second factors; which columns are pairs; a third factor, the same for all rows.

    Pairs come by their distance around the row. Behind them stand the numbers, with one factor.
    """
    pairs = N * (N + 1) // 2
    second = tl.where(column < pairs, (column % N + column // N) % N, column - pairs)
    places = tl.arange(0, BLOCK_N)[:, None] == second[None, :]
    return places, (column < pairs)[None, :], tl.where(column < N, ROOT, 1.0)[None, :]


@triton.jit
def _matrix(weight, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Places of W `[D, N]`, and which are inside."""
    row, column = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, BLOCK_N)[None, :]
    return weight + row * N + column, (row < D) & (column < N)


@triton.jit(do_not_specialize=["blocks", "length", "heads"])
def series_kernel(
    x,
    weight,  # [H, D, N] float32, or bfloat16 as x
    out,  # [B, H, T, P]: pairs, numbers, 1, zeros
    blocks, length, heads, scale,
    x_b, x_h, x_t, x_d,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch, head, first = place(blocks, heads, BLOCK_T)
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    there = (token < length)[:, None]
    cells = x + batch * x_b + head * x_h + token[:, None] * x_t + lane[None, :] * x_d
    tile = tl.load(cells, mask=there & (lane[None, :] < D), other=0.0)
    cells, inside = _matrix(weight + head * D * N, D, N, BLOCK_D, BLOCK_N)
    w = tl.load(cells, mask=inside, other=0.0)
    y = half_exact(tile, w, tl.zeros([BLOCK_T, BLOCK_N], tl.float32), SPLIT) * scale
    nothing = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    left = _pick(y, _firsts(N, BLOCK_C, BLOCK_N), nothing, SPLIT)
    out += ((batch * heads + head) * length + token[:, None]) * P
    for start in range(0, P, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        places, paired, gain = _seconds(column, N, BLOCK_N)
        right = _pick(y, places, nothing, SPLIT)
        found = tl.where(paired, left * gain, 1.0) * right
        found = tl.where((column == N * (N + 3) // 2)[None, :], 1.0, found)
        wanted = there & (column < P)[None, :]
        tl.store(out + column[None, :], found.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["blocks", "length", "heads", "steps"])
def series_gradient_kernel(
    x, weight,
    grad,  # [B, H, T, P]
    dx,  # [B, H, T, D]
    dweight,  # [B·H·blocks, D, N] float32: what each program adds
    blocks, length, heads, steps, scale,
    x_b, x_h, x_t, x_d, grad_b, grad_h, grad_t,
    D: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    LEARNED: tl.constexpr,
):  # fmt: skip
    """A program has `steps` blocks of tokens."""
    batch, head, first = place(blocks, heads, BLOCK_T)
    lane = tl.arange(0, BLOCK_D)
    x += batch * x_b + head * x_h + lane[None, :] * x_d
    grad += batch * grad_b + head * grad_h
    dx += (batch * heads + head) * length * D + lane[None, :]
    cells, inside = _matrix(weight + head * D * N, D, N, BLOCK_D, BLOCK_N)
    w = tl.load(cells, mask=inside, other=0.0)
    learned = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    nothing = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for step in range(steps):
        token = (first * steps + step * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
        wanted = (token < length) & (lane[None, :] < D)
        tile = tl.load(x + token * x_t, mask=wanted, other=0.0)
        y = half_exact(tile, w, tl.zeros([BLOCK_T, BLOCK_N], tl.float32), SPLIT) * scale
        left = _pick(y, _firsts(N, BLOCK_C, BLOCK_N), nothing, SPLIT)
        by_left = nothing
        dy = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, P, BLOCK_C):
            column = start + tl.arange(0, BLOCK_C)
            places, paired, gain = _seconds(column, N, BLOCK_N)
            given = (token < length) & (column < P)[None, :]
            slope = tl.load(grad + token * grad_t + column[None, :], mask=given, other=0.0)
            slope = slope.to(tl.float32) * gain
            by_left += tl.where(paired, slope, 0.0) * _pick(y, places, nothing, SPLIT)
            by_right = slope * tl.where(paired, left, 1.0)
            dy = _pick(by_right, tl.trans(places), dy, SPLIT)
        dy = _pick(by_left, tl.trans(_firsts(N, BLOCK_C, BLOCK_N)), dy, SPLIT) * scale
        if LEARNED:
            learned = half_exact(tl.trans(tile), dy, learned, SPLIT)
        into = rounded(dy, tl.trans(w), tl.zeros([BLOCK_T, BLOCK_D], tl.float32), SPLIT)
        tl.store(dx + token * D, into.to(dx.dtype.element_ty), mask=wanted)
    if LEARNED:
        dweight += tl.program_id(0).to(tl.int64) * D * N
        cells, inside = _matrix(dweight, D, N, BLOCK_D, BLOCK_N)
        tl.store(cells, learned, mask=inside)
