"""Kernels that run before a sweep: sums over chunks, and the factors of every row's gradient."""

import triton
import triton.language as tl

from cosformer.ops.triton.kernels.tile import (
    ROWS,
    apart,
    denominator,
    hidden,
    load_each,
    load_rows,
    relu,
    through_denominator,
)


@triton.jit(do_not_specialize=["length", "group"])
def sums_kernel(
    rows, basis, column, key_mask, added,
    heads, length, chunks, group,
    r_b, r_h, r_t, r_d, basis_b, basis_h, mask_b,
    E: tl.constexpr, BLOCK_E: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, RELU: tl.constexpr, COLUMN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Σ_j ψ_r(j) row_j over each chunk; with COLUMN, Σ_j δ_j ψ_r(j) row_j."""
    program = tl.program_id(0)
    chunk, head = program % chunks, program // chunks
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    index, element = tl.arange(0, C), tl.arange(0, BLOCK_E)
    begin = chunk * C
    valid = index < length - begin
    rows += b * r_b + (h // group) * r_h + begin.to(tl.int64) * r_t
    tile = load_rows(rows, index, element, r_t, r_d, valid, E, E == BLOCK_E)
    if MASKED:
        real = tl.load(key_mask + b * mask_b + begin + index, mask=valid, other=0) != 0
        tile = hidden(tile, real)
    if RELU:
        tile = relu(tile)
    tile = tile.to(tl.float32)
    if COLUMN:
        delta = tl.load(column + head.to(tl.int64) * length + begin + index, mask=valid, other=0.0)
        tile *= delta[:, None]
    psi = load_each(basis + b * basis_b + h * basis_h + (begin + index) * R, 1, valid, R)
    added += program.to(tl.int64) * R * WIDE + element
    for r in tl.static_range(R):
        tl.store(added + r * WIDE, tl.sum(psi[r][:, None] * tile, 0), mask=element < WIDE)


@triton.jit(do_not_specialize=["rows", "length"])
def prepare_kernel(
    grad, out, total, basis, scale, column, delta_table,
    rows, heads, length, eps, basis_b, basis_h,
    g_b, g_h, g_t, g_d, o_b, o_h, o_t, o_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """1/D, δ and δψ of every row, where δ = −(dout·out)/D · dD/dtotal."""
    row = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    valid = row < rows
    t, head = row % length, row // length
    b, h = head // heads, head % heads
    n = tl.arange(0, BLOCK_N)
    inside = valid[:, None] & (n[None, :] < N)
    at = (b * g_b + h * g_h + t * g_t)[:, None] + apart(n, g_d)[None, :]
    grads = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    at = (b * o_b + h * o_h + t * o_t)[:, None] + apart(n, o_d)[None, :]
    outs = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    row_total = tl.load(total + row, mask=valid, other=1.0)
    # Rounded before δ is made of it, so that g·v + δ cancels as it should.
    inverse = (1.0 / denominator(row_total, eps, RULE)).to(scale.dtype.element_ty)
    delta = -tl.sum(grads * outs, 1) * inverse.to(tl.float32)
    delta = through_denominator(delta, row_total, eps, RULE)
    tl.store(scale + row, inverse, mask=valid)
    tl.store(column + row, delta, mask=valid)
    sixteen = tl.arange(0, ROWS)
    at = (b * basis_b + h * basis_h + t * R)[:, None] + sixteen[None, :] % 4
    some = valid[:, None] & (sixteen[None, :] % 4 < R) & (sixteen[None, :] < 8)
    psi = tl.load(basis + at, mask=some, other=0.0) * delta[:, None]
    at = row[:, None] * ROWS + sixteen[None, :]
    tl.store(delta_table + at, psi.to(delta_table.dtype.element_ty), mask=valid[:, None])
