"""Decays per token (gates): their logarithms, running sums and gradients, a kernel each."""

import triton
import triton.language as tl

SMALLEST = tl.constexpr(1e-300)  # below the square of any float32 but 0


@triton.jit(do_not_specialize=["length", "heads"])
def gates_kernel(
    gates,
    grad,  # of the sums, with BACK
    out,  # [B, H, T]: the sums in float64, or with BACK the gradient of the gates
    right,  # [B, H]: whether no gate of a row is above 0
    length, heads, g_b, g_h, g_t,
    FLOOR: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Running sums over tokens, one program for each row; with BACK from the last token."""
    row = tl.program_id(0).to(tl.int64)
    gates += row // heads * g_b + row % heads * g_h
    token = tl.arange(0, BLOCK)
    carried = tl.zeros([1], tl.float64)
    fit = tl.full([BLOCK], 1, tl.int32)
    blocks = tl.cdiv(length, BLOCK)
    for n in range(blocks):
        if BACK:
            spot = (blocks - 1 - n) * BLOCK + token
        else:
            spot = n * BLOCK + token
        inside = spot < length
        gate = tl.load(gates + spot.to(tl.int64) * g_t, mask=inside, other=0.0).to(tl.float32)
        if BACK:
            values = tl.load(grad + row * length + spot, mask=inside, other=0.0)
        else:
            fit &= (gate <= 0).to(tl.int32)  # false for NaN
            values = tl.where(gate < FLOOR, FLOOR, gate).to(tl.float64)
        sums = tl.cumsum(values, 0, reverse=BACK) + carried
        edge = 0 if BACK else BLOCK - 1
        carried = tl.sum(tl.where(token == edge, sums, 0.0), 0, keep_dims=True)
        if BACK:
            sums = tl.where(gate < FLOOR, 0.0, sums)
        tl.store(out + row * length + spot, sums.to(out.dtype.element_ty), mask=inside)
    if not BACK:
        tl.store(right + row, tl.min(fit, 0) != 0)


@triton.jit(do_not_specialize=["length"])
def balance_kernel(
    by_query,  # [B, H, T] float32: φ·dφ
    by_key,
    found,  # [B, H, T]: their difference, less what it sums to
    length,
    BLOCK: tl.constexpr,
):
    """The gradient of a decay, corrected so that it sums to 0 over the tokens, as it must.

    A program reads its row twice. It works in float64, where squares neither overflow nor vanish.
    """
    row = tl.program_id(0).to(tl.int64) * length
    by_query += row
    by_key += row
    cell = tl.arange(0, BLOCK)
    excess = tl.zeros([BLOCK], tl.float64)
    variance = tl.zeros([BLOCK], tl.float64)
    for start in range(0, length, BLOCK):
        inside = start + cell < length
        one = tl.load(by_query + start + cell, mask=inside, other=0.0).to(tl.float64)
        other = tl.load(by_key + start + cell, mask=inside, other=0.0).to(tl.float64)
        excess += one - other
        variance += one * one + other * other
    rate = tl.sum(excess, 0) / tl.maximum(tl.sum(variance, 0), SMALLEST)
    for start in range(0, length, BLOCK):
        inside = start + cell < length
        one = tl.load(by_query + start + cell, mask=inside, other=0.0).to(tl.float64)
        other = tl.load(by_key + start + cell, mask=inside, other=0.0).to(tl.float64)
        grad = one - other - rate * (one * one + other * other)
        tl.store(found + row + start + cell, grad.to(found.dtype.element_ty), mask=inside)
