"""What surrounds attention in a step, for the few rows that a batch of single tokens has."""

import triton
import triton.language as tl


@triton.jit
def _normed(x, inside, weight, bias, lanes, width, eps):
    """A row after a layer norm, 0 outside of its width."""
    mean = tl.sum(x, 0) / width
    apart = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / width + eps)
    w = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + lanes, mask=inside, other=0.0).to(tl.float32)
    return apart * scale * w + b


@triton.jit
def linear_rows_kernel(
    x, weight, bias, residual, norm_weight, norm_bias, out,
    columns, eps, x_r, w_r, res_r, out_r,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,  # whether it may start before the kernel in front of it has ended
):  # fmt: skip
    """Columns of residual + gelu(norm(x) weightᵀ + bias), for all rows: weights are read once."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < columns
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    cells = n.to(tl.int64)[:, None] * w_r + k[None, :]
    w = tl.load(weight + cells, mask=in_n[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    if EARLY:  # weights are nobody's result: their loads need not wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for row in tl.static_range(ROWS):
        here = tl.load(x + row * x_r + k, mask=in_k, other=0.0).to(tl.float32)
        if NORM:
            here = _normed(here, in_k, norm_weight, norm_bias, k, K, eps)
        made = tl.sum(w * here[None, :], 1)
        if BIAS:
            made += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
        if GELU:
            made = 0.5 * made * (1.0 + tl.erf(made * 0.7071067811865476))
        if RESIDUAL:
            made += tl.load(residual + row * res_r + n, mask=in_n, other=0.0).to(tl.float32)
        tl.store(out + row * out_r + n, made.to(out.dtype.element_ty), mask=in_n)


@triton.jit
def add_norm_kernel(
    x, added, norm_weight, norm_bias, total, out, eps, x_r, added_r,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A row of x + added, and of the layer norm of that."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    here = tl.load(x + row * x_r + k, mask=in_k, other=0.0).to(tl.float32)
    if ADD:
        here += tl.load(added + row * added_r + k, mask=in_k, other=0.0).to(tl.float32)
        tl.store(total + row * K + k, here.to(total.dtype.element_ty), mask=in_k)
    made = _normed(here, in_k, norm_weight, norm_bias, k, K, eps)
    tl.store(out + row * K + k, made.to(out.dtype.element_ty), mask=in_k)


@triton.jit
def convolve_kernel(
    rows, state, taps, bias, columns, row_b, state_b, state_t,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Columns of a row, in place: Σ_n taps_n ⊙ the last inputs, of which the row is the newest."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    here = tl.load(rows + row * row_b + column, mask=inside, other=0.0)
    last = (WIDTH - 1) * columns
    made = here.to(tl.float32) * tl.load(taps + last + column, mask=inside, other=0.0)
    if BIAS:
        made += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for n in tl.static_range(WIDTH - 1):
        at = state + row * state_b + n * state_t + column
        before = tl.load(at, mask=inside, other=0.0)
        made += before.to(tl.float32) * tl.load(taps + n * columns + column, mask=inside, other=0.0)
        if n > 0:  # inputs move on by one
            tl.store(at - state_t, before, mask=inside)
    if WIDTH > 1:
        at = state + row * state_b + (WIDTH - 2) * state_t + column
        tl.store(at, here.to(state.dtype.element_ty), mask=inside)
    tl.store(rows + row * row_b + column, made.to(rows.dtype.element_ty), mask=inside)
