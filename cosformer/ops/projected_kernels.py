"""Features of projections, and their gradients: one read of x, one write of the result."""

import triton
import triton.language as tl

from cosformer.ops.product_kernels import exact, half_exact, place
from cosformer.ops.sine_kernels import sine_and_cosine

SMALLEST_NORM = tl.constexpr(1e-12)  # of torch.nn.functional.normalize
LOG_E = tl.constexpr(1.4426950408889634)  # to base 2, which a GPU's exponentials have


@triton.jit
def _factor(rows, scale, KIND: tl.constexpr):
    """`[T]`: what rows of x are multiplied with before they are projected."""
    if KIND == "waves" or KIND == "relu":
        return 1.0 / tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), SMALLEST_NORM)
    else:
        return tl.zeros([rows.shape[0]], tl.float32) + scale


@triton.jit
def _projections(tile, w, factor, KIND: tl.constexpr, SPLIT: tl.constexpr):
    """`[T, F]` float32: W x̂, or as exponents to base 2."""
    nothing = tl.zeros([tile.shape[0], w.shape[0]], tl.float32)
    by_row = factor * (LOG_E if KIND == "exp" or KIND == "softmaxes" else 1.0)
    return half_exact(tile, tl.trans(w), nothing, SPLIT) * by_row[:, None]


@triton.jit
def _weights(weight, column, lane, F: tl.constexpr, D: tl.constexpr):
    """`[F, D]`, a block of its rows."""
    inside = (column[:, None] < F) & (lane[None, :] < D)
    return tl.load(weight + column[:, None] * D + lane[None, :], mask=inside, other=0.0)


@triton.jit
def _softmax(y, real):
    """Of exponents to base 2."""
    y = tl.where(real[None, :], y, float("-inf"))
    powers = tl.exp2(y - tl.max(y, 1)[:, None])
    return powers * (1.0 / tl.sum(powers, 1))[:, None]


@triton.jit(do_not_specialize=["blocks", "length", "heads", "shared"])
def features_kernel(
    x,
    weight,  # [h, F, D] float32, or bfloat16 as x
    level,  # [B, H, T] float32: what exponents are relative to
    out,  # [B, H, T, P]: PARTS of F columns, the last LAST wide with its zeros
    blocks, length, heads, shared, scale, gain,
    x_b, x_h, x_t, x_d, level_b, level_h, level_t,
    F: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr, SPLIT: tl.constexpr, OWN: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """`OWN`: levels are rows' largest exponents, which are found and stored; else they are read."""
    batch, head, first = place(blocks, heads, BLOCK_T)
    token = first + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, BLOCK_D)
    there = token < length
    x += batch * x_b + head * x_h
    cells = x + token[:, None] * x_t + lane[None, :] * x_d
    tile = tl.load(cells, mask=there[:, None] & (lane[None, :] < D), other=0.0)
    weight += head // shared * F * D
    rows = tile.to(tl.float32)
    factor = _factor(rows, scale, KIND)
    shift = tl.zeros([BLOCK_T], tl.float32)
    if KIND == "exp":
        half = 0.5 * scale * scale * tl.sum(rows * rows, 1)
        levels = level + batch * level_b + head * level_h + token * level_t
        if OWN:
            top = tl.full([BLOCK_T], float("-inf"), tl.float32)
            nothing = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
            for start in range(0, F, BLOCK_F):
                column = start + tl.arange(0, BLOCK_F)
                w = _weights(weight, column, lane, F, D)
                y = half_exact(tile, tl.trans(w), nothing, SPLIT)
                top = tl.maximum(top, tl.max(tl.where(column[None, :] < F, y, float("-inf")), 1))
            shift = top * scale
            tl.store(levels, shift - half, mask=there)
        else:
            shift = half + tl.load(levels, mask=there, other=0.0)
        shift = shift * LOG_E - tl.log2(gain)
    if WRITE:
        out += ((batch * heads + head) * length + token[:, None]) * P
        for start in range(0, LAST, BLOCK_F):
            column = start + tl.arange(0, BLOCK_F)
            real = column < F
            w = _weights(weight, column, lane, F, D)
            y = _projections(tile, w, factor, KIND, SPLIT)
            if KIND == "exp":
                one = tl.exp2(y - shift[:, None])
            elif KIND == "waves":
                sine, cosine = sine_and_cosine(y)
                one = sine * gain
            elif KIND == "relu":
                one = tl.where(y < 0, 0.0, y) * gain  # NaN stays
            else:
                one = _softmax(y, real)
            one = tl.where(real[None, :], one, 0.0).to(out.dtype.element_ty)
            if PARTS == 1:
                wanted = there[:, None] & (column < LAST)[None, :]
                tl.store(out + column[None, :], one, mask=wanted)
            else:
                if KIND == "waves":
                    two = cosine * gain
                else:
                    two = _softmax(-y, real)
                two = tl.where(real[None, :], two, 0.0).to(out.dtype.element_ty)
                tl.store(out + column[None, :], one, mask=there[:, None] & real[None, :])
                wanted = there[:, None] & (column < LAST)[None, :]
                tl.store(out + F + column[None, :], two, mask=wanted)


@triton.jit
def _slope(
    y, shift, gain, grad, there, column,
    F: tl.constexpr, LAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The gradient of y, 0 outside; `grad` points to that of rows of features.

    The last part has LAST columns with its padding, at whose end wide loads may end.
    """
    wanted = there[:, None] & (column[None, :] < LAST)
    inside = there[:, None] & (column[None, :] < F)
    one = tl.load(grad + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    if KIND == "exp":
        slope = one * tl.exp2(y - shift[:, None])
    elif KIND == "relu":
        slope = tl.where(y > 0, one, 0.0) * gain
    else:
        two = tl.load(grad + F + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        if KIND == "waves":
            sine, cosine = sine_and_cosine(y)
            slope = (one * cosine - two * sine) * gain
        else:
            up, down = _softmax(y, column < F), _softmax(-y, column < F)
            up *= one - tl.sum(up * one, 1)[:, None]
            down *= two - tl.sum(down * two, 1)[:, None]
            slope = up - down
    return tl.where(inside, slope, 0.0)


@triton.jit(do_not_specialize=["blocks", "length", "heads", "shared", "steps"])
def gradients_kernel(
    x, weight, level,
    grad,  # [B, H, T, P]
    dx,  # [B, H, T, D]
    dweight,  # [B·H·blocks, F, D] float32: what each program adds
    blocks, length, heads, shared, steps, scale, gain,
    x_b, x_h, x_t, x_d, level_b, level_h, level_t, grad_b, grad_h, grad_t,
    F: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr, SPLIT: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """A program has `steps` blocks of tokens; `LEARNED` needs all of F in one block."""
    batch, head, first = place(blocks, heads, BLOCK_T)
    first *= steps
    lane = tl.arange(0, BLOCK_D)
    x += batch * x_b + head * x_h + lane[None, :] * x_d
    grad += batch * grad_b + head * grad_h
    weight += head // shared * F * D
    dx += (batch * heads + head) * length * D + lane[None, :]
    learned = tl.zeros([BLOCK_D, BLOCK_F], tl.float32)
    for step in range(steps):
        token = first + step * BLOCK_T + tl.arange(0, BLOCK_T)
        there = token < length
        wanted = there[:, None] & (lane[None, :] < D)
        tile = tl.load(x + token[:, None] * x_t, mask=wanted, other=0.0)
        rows = tile.to(tl.float32)
        square = tl.sum(rows * rows, 1)
        factor = _factor(rows, scale, KIND)
        shift = tl.zeros([BLOCK_T], tl.float32)
        if KIND == "exp":
            levels = level + batch * level_b + head * level_h + token * level_t
            shift = tl.load(levels, mask=there, other=0.0) + 0.5 * scale * scale * square
            shift = shift * LOG_E - tl.log2(gain)
        into = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_T], tl.float32)
        for start in range(0, F, BLOCK_F):
            column = start + tl.arange(0, BLOCK_F)
            w = _weights(weight, column, lane, F, D)
            y = _projections(tile, w, factor, KIND, SPLIT)
            row = grad + token[:, None] * grad_t
            slope = _slope(y, shift, gain, row, there, column, F, LAST, KIND)
            into = exact(slope, w, into, SPLIT)
            total += tl.sum(slope, 1)
            if LEARNED:
                learned = half_exact(tl.trans(tile), slope * factor[:, None], learned, SPLIT)
        into *= factor[:, None]
        if KIND == "exp":
            into -= (scale * scale) * total[:, None] * rows
        if KIND == "waves" or KIND == "relu":
            along = tl.sum(into * rows, 1) * factor * factor
            along = tl.where(tl.sqrt(square) > SMALLEST_NORM, along, 0.0)
            into -= along[:, None] * rows
        tl.store(dx + token[:, None] * D, into.to(dx.dtype.element_ty), mask=wanted)
    if LEARNED:
        column = tl.arange(0, BLOCK_F)
        dweight += tl.program_id(0).to(tl.int64) * F * D
        inside = (column[:, None] < F) & (lane[None, :] < D)
        tl.store(dweight + column[:, None] * D + lane[None, :], tl.trans(learned), mask=inside)
