"""Features of projections, and their gradients: one read of x, one write of the result."""

import triton
import triton.language as tl

from cosformer.ops.sine_kernels import waves
from cosformer.ops.triton.kernels.product import half_exact, place, rounded
from cosformer.ops.triton.kernels.tile import LOG_E

SMALLEST_NORM = tl.constexpr(1e-12)  # of torch.nn.functional.normalize
SHARE_STRIDES = ["share_b", "share_h", "share_t"]  # not compiled for: they follow from the length


@triton.jit
def _factor(rows, scale, KIND: tl.constexpr):
    """`[T]`: what rows of x are multiplied with before they are projected."""
    if KIND == "waves" or KIND == "relu":
        return 1.0 / tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), SMALLEST_NORM)
    else:
        return tl.zeros([rows.shape[0]], tl.float32) + scale


@triton.jit
def _to_exponents(factor, KIND: tl.constexpr):
    """With the logarithm that makes them exponents to base 2."""
    return factor * (LOG_E if KIND == "exp" or KIND == "softmaxes" else 1.0)


@triton.jit
def _block(weight, column, lane, F: tl.constexpr, D: tl.constexpr):
    """Rows of W, `[F, D]`."""
    cells = weight + column[:, None] * D + lane[None, :]
    return tl.load(cells, mask=(column[:, None] < F) & (lane[None, :] < D), other=0.0)


@triton.jit
def _both(weight, rest, column, lane, F: tl.constexpr, D: tl.constexpr):
    """Rows of W, and of its rest; of W again if there is none, for want of nothing in a pair."""
    w = _block(weight, column, lane, F, D)
    return w, w if rest is None else _block(rest, column, lane, F, D)


@triton.jit
def _products(tile, w, low, HAS_REST: tl.constexpr):
    """W x `[T, F]` float32."""
    y = tl.zeros([tile.shape[0], w.shape[0]], tl.float32)
    if HAS_REST:
        y = tl.dot(tile, tl.trans(low), y)
    if w.dtype == tl.bfloat16:
        return tl.dot(tile, tl.trans(w), y)
    else:
        return tl.dot(tile.to(tl.float32), tl.trans(w), y, input_precision="tf32x3")


@triton.jit
def _softmax(y, real):
    """Of exponents to base 2."""
    y = tl.where(real[None, :], y, float("-inf"))
    powers = tl.exp2(y - tl.max(y, 1)[:, None])
    return powers * (1.0 / tl.sum(powers, 1))[:, None]


@triton.jit
def _portion(share, token, there, share_t):
    """`[T]`: what rows of features are multiplied with; `share` points to a head's."""
    return tl.load(share + token * share_t, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["blocks", "length", "heads", "shared", *SHARE_STRIDES])
def features_kernel(
    x,
    weight,  # [h, F, D] float32, or bfloat16 as x
    rest,  # of W, where bfloat16 has not all of it
    level,  # [B, H, T] float32: what exponents are relative to
    share,  # [B, H, T], or None: a factor of a token's features
    out,  # [B, H, T, P]: PARTS of F columns, the last LAST wide with its zeros
    blocks, length, heads, shared, scale, gain,
    x_b, x_h, x_t, x_d, level_b, level_h, level_t, share_b, share_h, share_t,
    F: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr, OWN: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """`OWN`: levels are rows' largest exponents, which are found and stored; else they are read."""
    batch, head, first = place(blocks, heads, BLOCK_T)
    token = first + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, BLOCK_D)
    there = token < length
    weight += head // shared * F * D
    if rest is not None:
        rest += head // shared * F * D
    x += batch * x_b + head * x_h
    cells = x + token[:, None] * x_t + lane[None, :] * x_d
    tile = tl.load(cells, mask=there[:, None] & (lane[None, :] < D), other=0.0)
    rows = tile.to(tl.float32)
    factor = _factor(rows, scale, KIND)
    shift = tl.zeros([BLOCK_T], tl.float32)
    if KIND == "exp":
        half = 0.5 * scale * scale * tl.sum(rows * rows, 1)
        levels = level + batch * level_b + head * level_h + token * level_t
        if OWN:
            top = tl.full([BLOCK_T], float("-inf"), tl.float32)
            for start in range(0, F, BLOCK_F):
                column = start + tl.arange(0, BLOCK_F)
                w, low = _both(weight, rest, column, lane, F, D)
                y = _products(tile, w, low, rest is not None)
                top = tl.maximum(top, tl.max(tl.where(column[None, :] < F, y, float("-inf")), 1))
            shift = top * scale
            tl.store(levels, shift - half, mask=there)
        else:
            shift = half + tl.load(levels, mask=there, other=0.0)
        shift = shift * LOG_E - tl.log2(gain)
    if WRITE:
        if share is not None:
            portion = _portion(share + batch * share_b + head * share_h, token, there, share_t)
        out += ((batch * heads + head) * length + token[:, None]) * P
        for start in range(0, LAST, BLOCK_F):
            column = start + tl.arange(0, BLOCK_F)
            real = column < F
            w, low = _both(weight, rest, column, lane, F, D)
            y = _products(tile, w, low, rest is not None) * _to_exponents(factor, KIND)[:, None]
            if KIND == "exp":
                one = tl.exp2(y - shift[:, None])
            elif KIND == "waves":
                sine, cosine = waves(y, out.dtype.element_ty == tl.bfloat16)
                one = sine * gain
            elif KIND == "relu":
                one = tl.where(y < 0, 0.0, y) * gain  # NaN stays
            else:
                one = _softmax(y, real)
            if share is not None:
                one *= portion[:, None]
            one = tl.where(real[None, :], one, 0.0).to(out.dtype.element_ty)
            if PARTS == 1:
                wanted = there[:, None] & (column < LAST)[None, :]
                tl.store(out + column[None, :], one, mask=wanted)
            else:
                if KIND == "waves":
                    two = cosine * gain
                else:
                    two = _softmax(-y, real)
                if share is not None:
                    two *= portion[:, None]
                two = tl.where(real[None, :], two, 0.0).to(out.dtype.element_ty)
                tl.store(out + column[None, :], one, mask=there[:, None] & real[None, :])
                wanted = there[:, None] & (column < LAST)[None, :]
                tl.store(out + F + column[None, :], two, mask=wanted)


@triton.jit
def _slope(
    y, shift, gain, grad, there, column,
    F: tl.constexpr, LAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The gradient of y, 0 outside, and φ·dφ `[T]`; `grad` points to dφ of rows of features.

    The last part has LAST columns with its padding, at whose end wide loads may end.
    """
    wanted = there[:, None] & (column[None, :] < LAST)
    real = (column < F)[None, :]
    one = tl.load(grad + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    if KIND == "exp":
        slope = tl.where(real, one * tl.exp2(y - shift[:, None]), 0.0)
        return slope, tl.sum(slope, 1)
    elif KIND == "relu":
        slope = tl.where(real & (y > 0), one, 0.0) * gain
        return slope, tl.sum(slope * y, 1)
    else:
        two = tl.load(grad + F + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        one, two = tl.where(real, one, 0.0), tl.where(real, two, 0.0)
        if KIND == "waves":
            sine, cosine = waves(y, grad.dtype.element_ty == tl.bfloat16)
            dots = (tl.sum(one * sine, 1) + tl.sum(two * cosine, 1)) * gain
            return (one * cosine - two * sine) * gain, dots
        else:
            up, down = _softmax(y, column < F), _softmax(-y, column < F)
            by_up, by_down = tl.sum(up * one, 1), tl.sum(down * two, 1)
            slope = up * (one - by_up[:, None]) - down * (two - by_down[:, None])
            return slope, by_up + by_down


@triton.jit(do_not_specialize=["blocks", "length", "heads", "shared", "steps", *SHARE_STRIDES])
def gradients_kernel(
    x, weight, rest, level, share,
    grad,  # [B, H, T, P]
    dx,  # [B, H, T, D]
    dweight,  # [B·H·blocks, F, D] float32: what each program adds
    dshare,  # [B, H, T], or None
    blocks, length, heads, shared, steps, scale, gain,
    x_b, x_h, x_t, x_d, level_b, level_h, level_t, share_b, share_h, share_t,
    grad_b, grad_h, grad_t,
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
    if rest is not None:
        rest += head // shared * F * D
    dx += (batch * heads + head) * length * D + lane[None, :]
    learned = tl.zeros([BLOCK_D, BLOCK_F], tl.float32)
    if F <= BLOCK_F:
        all_w, all_low = _both(weight, rest, tl.arange(0, BLOCK_F), lane, F, D)
    for step in range(steps):
        token = first + step * BLOCK_T + tl.arange(0, BLOCK_T)
        there = token < length
        wanted = there[:, None] & (lane[None, :] < D)
        tile = tl.load(x + token[:, None] * x_t, mask=wanted, other=0.0)
        rows = tile.to(tl.float32)
        square = tl.sum(rows * rows, 1)
        factor = _factor(rows, scale, KIND)
        back = factor  # what rows of gradients are multiplied with
        if share is not None:
            portion = _portion(share + batch * share_b + head * share_h, token, there, share_t)
            back *= portion
        shift = tl.zeros([BLOCK_T], tl.float32)
        if KIND == "exp":
            levels = level + batch * level_b + head * level_h + token * level_t
            shift = tl.load(levels, mask=there, other=0.0) + 0.5 * scale * scale * square
            shift = shift * LOG_E - tl.log2(gain)
        into = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_T], tl.float32)
        for start in range(0, F, BLOCK_F):
            column = start + tl.arange(0, BLOCK_F)
            if F <= BLOCK_F:
                w, low = all_w, all_low
            else:
                w, low = _both(weight, rest, column, lane, F, D)
            y = _products(tile, w, low, rest is not None) * _to_exponents(factor, KIND)[:, None]
            row = grad + token[:, None] * grad_t
            slope, dots = _slope(y, shift, gain, row, there, column, F, LAST, KIND)
            into = rounded(slope, w, into, SPLIT)
            if rest is not None:
                into = rounded(slope, low, into, SPLIT)
            total += dots
            if LEARNED:
                learned = half_exact(tl.trans(tile), slope * back[:, None], learned, SPLIT)
        into *= back[:, None]
        if KIND == "exp":
            faded = total if share is None else total * portion
            into -= (scale * scale) * faded[:, None] * rows
        if KIND == "waves" or KIND == "relu":
            along = tl.sum(into * rows, 1) * factor * factor
            along = tl.where(tl.sqrt(square) > SMALLEST_NORM, along, 0.0)
            into -= along[:, None] * rows
        tl.store(dx + token[:, None] * D, into.to(dx.dtype.element_ty), mask=wanted)
        if dshare is not None:
            cells = dshare + (batch * heads + head) * length + token
            tl.store(cells, total.to(dshare.dtype.element_ty), mask=there)
    if LEARNED:
        column = tl.arange(0, BLOCK_F)
        dweight += tl.program_id(0).to(tl.int64) * F * D
        inside = (column[:, None] < F) & (lane[None, :] < D)
        tl.store(dweight + column[:, None] * D + lane[None, :], tl.trans(learned), mask=inside)
