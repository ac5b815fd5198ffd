"""What surrounds attention in a step, for the few rows that a batch of single tokens has.

Where `EARLY` is set, a kernel is started before the one in front of it has ended (programmatic
dependent launch). It lets the next one start at once, loads what no kernel of a step changes (the
weights), and waits before it reads or writes anything else.
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
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def linear_rows_kernel(
    x, weight, bias, residual, norm_weight, norm_bias, out,
    columns, eps, x_r, w_r, res_r, out_r,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Columns of residual + gelu(norm(x) weightᵀ + bias), for all rows: weights are read once."""
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
        norm_w = tl.load(norm_weight + k, mask=in_k, other=0.0)
        norm_b = tl.load(norm_bias + k, mask=in_k, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    given = ()
    before = ()
    for row in tl.static_range(ROWS):  # all loads go before the first is used
        given += (tl.load(x + row * x_r + k, mask=in_k, other=0.0),)
        if RESIDUAL:
            before += (tl.load(residual + row * res_r + n, mask=in_n, other=0.0),)
    for row in tl.static_range(ROWS):
        here = given[row].to(tl.float32)
        if NORM:
            here = _normed(here, in_k, norm_w, norm_b, K, eps)
        made = tl.sum(w.to(tl.float32) * here[None, :], 1)
        if BIAS:
            made += shift.to(tl.float32)
        if GELU:
            made = _gelu(made)
        if RESIDUAL:
            made += before[row].to(tl.float32)
        tl.store(out + row * out_r + n, made.to(out.dtype.element_ty), mask=in_n)


@triton.jit
def _fetch(at):
    """Bring what lies at these addresses into the cache that all multiprocessors share."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _multiplied(
    made, x, weight, norm_weight, norm_bias, mean, scale, start, in_r,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`made` + weight norm(x)ᵀ over BLOCK_K columns from `start` on."""
    k = start + tl.arange(0, BLOCK_K)
    in_k = k < K
    w = tl.load(weight + k[None, :], mask=in_k[None, :], other=0.0)
    here = tl.load(x + k[None, :], mask=in_r[:, None] & in_k[None, :], other=0.0)
    if NORM:
        norm_w = tl.load(norm_weight + k, mask=in_k, other=0.0).to(tl.float32)
        norm_b = tl.load(norm_bias + k, mask=in_k, other=0.0).to(tl.float32)
        apart = (here.to(tl.float32) - mean[:, None]) * scale[:, None]
        here = (apart * norm_w[None, :] + norm_b[None, :]).to(w.dtype)
    return tl.dot(w, tl.trans(here), made, input_precision="ieee")


@triton.jit
def linear_blocks_kernel(
    x, weight, bias, residual, norm_weight, norm_bias, out,
    count, columns, eps, x_r, w_r, res_r, out_r,
    K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of residual + gelu(norm(x) weightᵀ + bias) by tensor cores.

    The block is made transposed: 16 or 32 columns are enough then to occupy tensor cores.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_n = n < columns
    in_r = r < count
    weight += tl.minimum(n, columns - 1).to(tl.int64)[:, None] * w_r  # nothing lies past the last
    x += r[:, None] * x_r
    cells = in_r[:, None] & in_n[None, :]
    if EARLY:  # one address for each 32 bytes
        for start in tl.static_range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K // 16) * 16
            _fetch(weight + tl.where(k < K, k, 0)[None, :])
        tl.extra.cuda.gdc_wait()
    mean = tl.zeros([BLOCK_R], tl.float32)
    scale = mean
    if NORM:
        total = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        squares = total
        for start in tl.static_range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = in_r[:, None] & (k < K)[None, :]
            here = tl.load(x + k[None, :], mask=inside, other=0.0).to(tl.float32)
            total += here
            squares += here * here
        mean = tl.sum(total, 1) / K
        # The difference loses less than 16-bit numbers of such a mean have lost already.
        scale = tl.rsqrt(tl.maximum(tl.sum(squares, 1) / K - mean * mean, 0.0) + eps)
    # Two sums, of which neither awaits the other.
    even = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    odd = even
    for start in tl.range(0, K, 2 * BLOCK_K, num_stages=STAGES):
        even = _multiplied(
            even, x, weight, norm_weight, norm_bias, mean, scale, start, in_r, K, BLOCK_K, NORM
        )
        then = start + BLOCK_K
        odd = _multiplied(
            odd, x, weight, norm_weight, norm_bias, mean, scale, then, in_r, K, BLOCK_K, NORM
        )
    made = tl.trans(even + odd)
    if BIAS:
        made += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if GELU:
        made = _gelu(made)
    if RESIDUAL:
        at = residual + r[:, None] * res_r + n[None, :]
        made += tl.load(at, mask=cells, other=0.0).to(tl.float32)
    at = out + r[:, None] * out_r + n[None, :]
    tl.store(at, made.to(out.dtype.element_ty), mask=cells)


@triton.jit
def add_norm_kernel(
    x, added, norm_weight, norm_bias, total, out, eps, x_r, added_r,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row of x + added, and of the layer norm of that."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    norm_w = tl.load(norm_weight + k, mask=in_k, other=0.0)
    norm_b = tl.load(norm_bias + k, mask=in_k, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
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
