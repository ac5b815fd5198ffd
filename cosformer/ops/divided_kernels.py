"""Turned features of keys, and of queries over their denominators Z, with gradients of both.

Running sums within a block of tokens are products with a triangle of ones. Those over the blocks
before it lie in `sums`, `[B, H, slots, D]` float32: under causality cumulated, with one slot more
than there are blocks and 0 in the first; else one slot has the sum over all blocks. A program has
a block of tokens in `HEADS` heads of keys, which share its angles, and their `GROUPS` of queries.
"""

import triton
import triton.language as tl

from cosformer.ops.features.rotary_kernels import angles, features, float_rows, turned
from cosformer.ops.triton.kernels.product import half_exact, place
from cosformer.ops.triton.kernels.tile import denominator, through_denominator


@triton.jit
def _shown(real, batch, real_b, token, length, lane, D: tl.constexpr):
    """Which numbers of a block of keys count; `real` is the mask `[B, T]`, or None."""
    shown = token < length
    if real is not None:
        shown = tl.load(real + batch * real_b + token, mask=shown, other=0) != 0
    return shown[:, None] & (lane[None, :] < D)


@triton.jit
def _sum_before(sums, row, slot, slots, lane, D: tl.constexpr):
    """`[1, D]`: a slot of the sums of a row, which is a head of one of the batch."""
    cells = sums + (row * slots + slot) * D + lane
    return tl.load(cells, mask=lane < D, other=0.0)[None, :]


@triton.jit
def _store_sum(sums, row, slot, slots, lane, tile, D: tl.constexpr):
    """The sum over a block in a slot; whoever fills the second slot puts 0 in the first."""
    cells = sums + row * slots * D + lane
    tl.store(cells + slot * D, tl.sum(tile, 0), mask=lane < D)
    tl.store(cells, tl.zeros_like(lane).to(tl.float32), mask=(lane < D) & (slot == 1))


@triton.jit
def _running(tile, AFTER: tl.constexpr, SHORT: tl.constexpr):
    """Sums of rows up to and with each, or AFTER and with it.

    Where 16 bits are read and written, SHORT, a product with a triangle of ones, 16 bits of each
    number; tensor cores have nothing as short for float32. Rounded to 8 bits, keys would be missed
    in gradients, from which nearly all cancels where there are few features.
    """
    if SHORT:
        row = tl.arange(0, tile.shape[0])
        if AFTER:
            triangle = row[:, None] <= row[None, :]
        else:
            triangle = row[:, None] >= row[None, :]
        return half_exact(triangle.to(tl.bfloat16), tile, tl.zeros_like(tile), SHORT)
    else:
        return tl.cumsum(tile, 0, reverse=AFTER)


@triton.jit(do_not_specialize=["slots"])
def cumulate_kernel(
    sums,  # of which each slot gets those before it added
    slots, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sums += tl.program_id(0).to(tl.int64) * slots * D
    lane = tl.arange(0, BLOCK_D)
    carried = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        inside = (slot[:, None] < slots) & (lane[None, :] < D)
        cells = sums + slot[:, None] * D + lane[None, :]
        tile = tl.load(cells, mask=inside, other=0.0)
        tl.store(cells, carried + tl.cumsum(tile, 0), mask=inside)
        carried += tl.sum(tile, 0, keep_dims=True)


@triton.jit(do_not_specialize=["blocks", "parts", "length", "heads", "real_b"])
def sums_kernel(
    k,
    real,  # [B, T] bytes, or None
    sums,  # [B, H, blocks + 1, D]: Σ φ(k) over each block
    blocks, parts, length, heads, real_b, k_b, k_h, k_t, k_d,
    D: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch, part, first = place(blocks, parts, BLOCK_T)
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, 2 * PAIRS)
    shown = _shown(real, batch, real_b, token, length, lane, D)
    for head in range(part * HEADS, tl.minimum(part * HEADS + HEADS, heads)):
        phi, _ = features(k + batch * k_b + head * k_h, token, lane, k_t, k_d, shown)
        slot = first // BLOCK_T + 1
        _store_sum(sums, batch * heads + head, slot, blocks + 1, lane, phi, D)


@triton.jit(do_not_specialize=["blocks", "parts", "length", "heads", "slots", "real_b"])
def turn_kernel(
    q, k, real, sums,
    turned_q,  # [B, H·GROUPS, T, D]: R φ(q)/Z
    turned_k,  # [B, H, T, D]: R φ(k)
    total,  # [B, H·GROUPS, T] float32: Z before eps
    blocks, parts, length, heads, slots, real_b, eps,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d,
    D: tl.constexpr, LOG_BASE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    CAUSAL: tl.constexpr, SHORT: tl.constexpr, BLOCK_T: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch, part, first = place(blocks, parts, BLOCK_T)
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, 2 * PAIRS)
    there = token < length
    inside = there[:, None] & (lane[None, :] < D)
    shown = _shown(real, batch, real_b, token, length, lane, D)
    sin, cos = angles(token, D, LOG_BASE, SHORT, PAIRS)
    for head in range(part * HEADS, tl.minimum(part * HEADS + HEADS, heads)):
        row = batch * heads + head
        keys, _ = features(k + batch * k_b + head * k_h, token, lane, k_t, k_d, shown)
        cells = turned_k + (row * length + token[:, None]) * D + lane[None, :]
        tl.store(cells, turned(keys, sin, cos).to(turned_k.dtype.element_ty), mask=inside)
        seen = _sum_before(sums, row, first // BLOCK_T if CAUSAL else 0, slots, lane, D)
        if CAUSAL:
            seen += _running(keys, False, SHORT)
        for member in range(GROUPS):
            cells = q + batch * q_b + (head * GROUPS + member) * q_h
            phi, _ = features(cells, token, lane, q_t, q_d, inside)
            summed = tl.sum(phi * seen, 1)
            index = (row * GROUPS + member) * length + token
            tl.store(total + index, summed, mask=there)
            found = turned(phi * (1.0 / denominator(summed, eps, "clamp"))[:, None], sin, cos)
            cells = turned_q + index[:, None] * D + lane[None, :]
            tl.store(cells, found.to(turned_q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks", "parts", "length", "heads"])
def slopes_kernel(
    q, total,
    grad,  # of R φ(q)/Z
    slope,  # [B, H, T] float32: the gradient of Z
    sums,  # [B, H, blocks + 1, D]: Σ dZ φ(q) over each block, the last first
    blocks, parts, length, heads, eps, q_b, q_h, q_t, q_d, grad_b, grad_h, grad_t,
    D: tl.constexpr, LOG_BASE: tl.constexpr, HEADS: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_T: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """`heads` are those of queries."""
    batch, part, first = place(blocks, parts, BLOCK_T)
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, 2 * PAIRS)
    there = token < length
    inside = there[:, None] & (lane[None, :] < D)
    sin, cos = angles(token, D, LOG_BASE, SHORT, PAIRS)
    for head in range(part * HEADS, tl.minimum(part * HEADS + HEADS, heads)):
        row = batch * heads + head
        phi, _ = features(q + batch * q_b + head * q_h, token, lane, q_t, q_d, inside)
        cells = grad + batch * grad_b + head * grad_h
        given = float_rows(cells, token, lane, grad_t, 1, inside, 0.0)
        summed = tl.load(total + row * length + token, mask=there, other=1.0)
        factor = 1.0 / denominator(summed, eps, "clamp")
        by_total = -tl.sum(given * turned(phi, sin, cos), 1) * factor * factor
        by_total = through_denominator(by_total, summed, eps, "clamp")
        tl.store(slope + row * length + token, by_total, mask=there)
        slot = blocks - first // BLOCK_T
        _store_sum(sums, row, slot, blocks + 1, lane, by_total[:, None] * phi, D)


@triton.jit(do_not_specialize=["blocks", "parts", "length", "heads", "slots", "real_b"])
def gradients_kernel(
    q, k, real, sums, total,
    slope,  # the gradient of Z
    after,  # sums of dZ φ(q), from the last block on
    grad_q, grad_k,  # of the turned features
    dq, dk,
    blocks, parts, length, heads, slots, real_b, eps,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d,
    grad_q_b, grad_q_h, grad_q_t, grad_k_b, grad_k_h, grad_k_t,
    D: tl.constexpr, LOG_BASE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    CAUSAL: tl.constexpr, SHORT: tl.constexpr, BLOCK_T: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch, part, first = place(blocks, parts, BLOCK_T)
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, 2 * PAIRS)
    there = token < length
    inside = there[:, None] & (lane[None, :] < D)
    shown = _shown(real, batch, real_b, token, length, lane, D)
    block = first // BLOCK_T
    sin, cos = angles(token, D, LOG_BASE, SHORT, PAIRS)
    for head in range(part * HEADS, tl.minimum(part * HEADS + HEADS, heads)):
        row = batch * heads + head
        keys, key_slope = features(k + batch * k_b + head * k_h, token, lane, k_t, k_d, shown)
        seen = _sum_before(sums, row, block if CAUSAL else 0, slots, lane, D)
        if CAUSAL:
            seen += _running(keys, False, SHORT)
        behind = tl.zeros([1, 2 * PAIRS], tl.float32)
        tile = tl.zeros([BLOCK_T, 2 * PAIRS], tl.float32)
        for member in range(GROUPS):
            query_head = head * GROUPS + member
            query_row = row * GROUPS + member
            behind += _sum_before(
                after, query_row, blocks - 1 - block if CAUSAL else 0, slots, lane, D
            )
            phi, query_slope = features(
                q + batch * q_b + query_head * q_h, token, lane, q_t, q_d, inside
            )
            index = query_row * length + token
            by_total = tl.load(slope + index, mask=there, other=0.0)[:, None]
            summed = tl.load(total + index, mask=there, other=1.0)
            tile += by_total * phi
            given = float_rows(
                grad_q + batch * grad_q_b + query_head * grad_q_h,
                token, lane, grad_q_t, 1, inside, 0.0,
            )  # fmt: skip
            found = turned(given, -sin, cos) * (1.0 / denominator(summed, eps, "clamp"))[:, None]
            found = (found + by_total * seen) * query_slope
            cells = dq + index[:, None] * D + lane[None, :]
            tl.store(cells, found.to(dq.dtype.element_ty), mask=inside)
        given = float_rows(
            grad_k + batch * grad_k_b + head * grad_k_h, token, lane, grad_k_t, 1, inside, 0.0
        )
        found = turned(given, -sin, cos) + behind
        if CAUSAL:
            found += _running(tile, True, SHORT)
        cells = dk + (row * length + token[:, None]) * D + lane[None, :]
        tl.store(cells, (found * key_slope).to(dk.dtype.element_ty), mask=inside)
