"""What surrounds attention in a step, for the few rows that a batch of single tokens has.

Where `EARLY` is set, a kernel is started before the one in front of it has ended (programmatic
dependent launch). It lets the next one start at once, loads weights, and waits before it reads or
writes anything else; `early_launch` says what kernels may load before they wait.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(x, inside, weight, bias, width, eps):
    """A row after a layer norm, 0 outside of its width."""
    mean = tl.sum(x, 0) / width
    apart = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / width + eps)
    return apart * scale * weight.to(tl.float32) + bias.to(tl.float32)


@triton.jit
def linear_rows_kernel(
    x, weight, bias, residual, norm_weight, norm_bias, out,
    columns, eps, x_r, w_r, res_r, out_r,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Columns of residual + gelu(norm(x) weightᵀ + bias), for all rows: weights are read once.

    The norm costs no wait of its own. With d = x − x_0, m the mean of d and w′ the weight times
    that of the norm, norm(x) weightᵀ is (Σ w′ d − m Σ w′)/√(Σ d²/K − m² + eps), and the sums over d
    are made side by side. As (x_0 − mean)² is at most K variances, the difference loses at most K
    roundings of the variance, however large the mean is.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < columns
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    cells = n.to(tl.int64)[:, None] * w_r + k[None, :]
    w = tl.load(weight + cells, mask=in_n[:, None] & in_k[None, :], other=0.0)
    if BIAS:
        shift = tl.load(bias + n, mask=in_n, other=0.0)
    if NORM:
        norm_w = tl.load(norm_weight + k, mask=in_k, other=0.0).to(tl.float32)
        norm_b = tl.load(norm_bias + k, mask=in_k, other=0.0).to(tl.float32)
        by_bias = tl.sum(w.to(tl.float32) * norm_b[None, :], 1)
    w = w.to(tl.float32)
    if NORM:
        w *= norm_w[None, :]
        by_mean = tl.sum(w, 1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    given = ()
    firsts = ()
    before = ()
    for row in tl.static_range(ROWS):  # all loads go before the first is used
        given += (tl.load(x + row * x_r + k, mask=in_k, other=0.0),)
        if NORM:
            firsts += (tl.load(x + row * x_r),)
        if RESIDUAL:
            before += (tl.load(residual + row * res_r + n, mask=in_n, other=0.0),)
    for row in tl.static_range(ROWS):
        here = given[row].to(tl.float32)
        if NORM:
            here = tl.where(in_k, here - firsts[row].to(tl.float32), 0.0)
        made = tl.sum(w * here[None, :], 1)
        if NORM:
            mean = tl.sum(here, 0) / K
            spread = tl.maximum(tl.sum(here * here, 0) / K - mean * mean, 0.0)
            made = (made - mean * by_mean) * tl.rsqrt(spread + eps) + by_bias
        if BIAS:
            made += shift.to(tl.float32)
        if GELU:
            made = 0.5 * made * (1.0 + tl.erf(made * 0.7071067811865476))
        if RESIDUAL:
            made += before[row].to(tl.float32)
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
    norm_w = tl.load(norm_weight + k, mask=in_k, other=0.0)
    norm_b = tl.load(norm_bias + k, mask=in_k, other=0.0)
    here = tl.load(x + row * x_r + k, mask=in_k, other=0.0).to(tl.float32)
    if ADD:
        here += tl.load(added + row * added_r + k, mask=in_k, other=0.0).to(tl.float32)
        tl.store(total + row * K + k, here.to(total.dtype.element_ty), mask=in_k)
    made = _normed(here, in_k, norm_w, norm_b, K, eps)
    tl.store(out + row * K + k, made.to(out.dtype.element_ty), mask=in_k)


@triton.jit
def convolve_kernel(
    rows, state, taps, bias, columns, row_b, state_b, state_t,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Columns of a row, in place: Σ_n taps_n ⊙ the last inputs, of which the row is the newest."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
