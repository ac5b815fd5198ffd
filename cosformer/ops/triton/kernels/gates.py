"""Decays per token (gates): running sums and the gradient of the decay, by blocks of tokens.

A row that is one block takes one launch (ALONE). A longer row takes two: the first (PARTS) leaves
the sum of every block, the second (JOINED) reads the sums of the other blocks.
"""

import triton
import triton.language as tl

ALONE = tl.constexpr(0)
PARTS = tl.constexpr(1)
JOINED = tl.constexpr(2)
SMALLEST = tl.constexpr(1e-300)  # below the square of any float32 but 0
AT_ONCE = tl.constexpr(256)  # parts that are read at once


@triton.jit
def sum_of_parts(parts, first, last):
    """The sum of parts[first : last]."""
    lane = tl.arange(0, AT_ONCE)
    sums = tl.zeros([AT_ONCE], tl.float64)
    for start in range(first, last, AT_ONCE):
        sums += tl.load(parts + start + lane, mask=start + lane < last, other=0.0)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["length", "heads", "blocks"])
def gates_kernel(
    gates,
    grad,  # of the sums, with BACK
    out,  # [B, H, T]: the sums in float64, or with BACK the gradient of the gates
    right,  # [B, H, blocks]: whether no gate of a block is above 0
    parts,  # [B, H, blocks]: the sum of each block, float64
    length, heads, blocks, g_b, g_h, g_t,
    FLOOR: tl.constexpr, BACK: tl.constexpr, PASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Running sums over tokens, one program for each block; with BACK from the last token."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    gates += row // heads * g_b + row % heads * g_h
    spot = block * BLOCK + tl.arange(0, BLOCK)
    inside = spot < length
    gate = tl.load(gates + spot * g_t, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        values = tl.load(grad + row * length + spot, mask=inside, other=0.0).to(tl.float64)
    else:
        values = tl.where(gate < FLOOR, FLOOR, gate).to(tl.float64)
    if PASS == PARTS:
        tl.store(parts + program, tl.sum(values, 0))
        return
    sums = tl.cumsum(values, 0, reverse=BACK)
    if PASS == JOINED:
        parts += row * blocks
        if BACK:
            sums += sum_of_parts(parts, block + 1, blocks)
        else:
            sums += sum_of_parts(parts, 0, block)
    if BACK:
        sums = tl.where(gate < FLOOR, 0.0, sums)
    else:
        tl.store(right + program, tl.min((gate <= 0).to(tl.int32), 0) != 0)  # false for NaN
    tl.store(out + row * length + spot, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "blocks", "rows"])
def balance_kernel(
    by_query,  # [B, H, T] float32: φ·dφ
    by_key,
    found,  # [B, H, T]: their difference, less what it sums to
    parts,  # [2, B, H, blocks]: what each block sums to, and the sum of its squares; float64
    length, blocks, rows,
    PASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a decay, corrected so that it sums to 0 over the tokens, as it must.

    It is made in float64, where squares neither overflow nor vanish.
    """
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    spot = block * BLOCK + tl.arange(0, BLOCK)
    inside = spot < length
    one = tl.load(by_query + row * length + spot, mask=inside, other=0.0).to(tl.float64)
    other = tl.load(by_key + row * length + spot, mask=inside, other=0.0).to(tl.float64)
    squares = one * one + other * other
    if PASS == JOINED:
        excess = sum_of_parts(parts + row * blocks, 0, blocks)
        variance = sum_of_parts(parts + (rows + row) * blocks, 0, blocks)
    else:
        excess = tl.sum(one - other, 0)
        variance = tl.sum(squares, 0)
    if PASS == PARTS:
        tl.store(parts + program, excess)
        tl.store(parts + rows * blocks + program, variance)
    else:
        grad = one - other - excess / tl.maximum(variance, SMALLEST) * squares
        tl.store(found + row * length + spot, grad.to(found.dtype.element_ty), mask=inside)
