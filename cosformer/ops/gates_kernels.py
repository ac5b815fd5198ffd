"""Running sums of gates, and their gradients: one read, one write."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length", "heads"])
def gates_kernel(
    gates,
    grad,  # of the sums, with BACK
    out,  # [B, H, T]: the sums in float64, or with BACK the gradient of the gates
    right,  # [B, H]: whether no gate of a row is above 0
    length, heads, g_b, g_h, g_t,
    FLOOR: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row, a block of tokens at a time; with BACK from the end."""
    row = tl.program_id(0).to(tl.int64)
    gates += row // heads * g_b + row % heads * g_h
    token = tl.arange(0, BLOCK)
    carried = tl.zeros([1], tl.float64)
    fit = tl.full([BLOCK], 1, tl.int32)
    blocks = tl.cdiv(length, BLOCK)
    for n in range(blocks):
        if BACK:
            place = (blocks - 1 - n) * BLOCK + token
        else:
            place = n * BLOCK + token
        inside = place < length
        gate = tl.load(gates + place.to(tl.int64) * g_t, mask=inside, other=0.0).to(tl.float32)
        if BACK:
            values = tl.load(grad + row * length + place, mask=inside, other=0.0)
        else:
            fit &= (gate <= 0).to(tl.int32)  # NaN is not
            values = tl.where(gate < FLOOR, FLOOR, gate).to(tl.float64)
        sums = tl.cumsum(values, 0, reverse=BACK) + carried
        edge = 0 if BACK else BLOCK - 1
        carried = tl.sum(tl.where(token == edge, sums, 0.0), 0, keep_dims=True)
        if BACK:
            sums = tl.where(gate < FLOOR, 0.0, sums)
        tl.store(out + row * length + place, sums.to(out.dtype.element_ty), mask=inside)
    if not BACK:
        tl.store(right + row, tl.min(fit, 0) != 0)
