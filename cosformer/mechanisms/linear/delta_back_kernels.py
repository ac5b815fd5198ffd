"""Gradients of the delta rule by chunks; `delta_kernels.py` has the formulas and their chain."""

import triton
import triton.language as tl

from cosformer.mechanisms.linear.delta_kernels import (
    SHORTEST,
    decays,
    dot,
    fading_of,
    load_tile,
    reciprocal,
    store_tile,
)
from cosformer.ops.triton.kernels.product import place
from cosformer.ops.triton.kernels.tile import load_rows

TINY = tl.constexpr(1e-30)  # a β that gradients may be divided by


@triton.jit
def _common(slope, tile, share):
    """The product of each gradient of a unit row with that row."""
    return tl.sum(slope * tile.to(tl.float32), 1) * share


@triton.jit
def _through_norm(slope, tile, share, common):
    """The gradient of rows, of that of unit rows."""
    bent = tl.where(share * SHORTEST < 0.9999, common * share, 0.0)
    return share[:, None] * (slope - bent[:, None] * tile.to(tl.float32))


@triton.jit(do_not_specialize=["blocks", "length", "heads"])
def ask_kernel(
    q, k, grad, sums, written, solver,
    asked,  # [B, H, T, D]: Tᵀ e^(G_C−G) k
    back,  # [B, H, T, V]: Tᵀ (F ⊙ q kᵀ)ᵀ dout
    slopes,  # [B, H, n, D, V]: (e^G q)ᵀ dout
    blocks, length, heads, scale,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, g_b, g_h, g_t, g_d,
    GROUPS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What is known of a chunk's gradients before that of its memory; a head of keys."""
    batch, head, first = place(blocks, heads, C)
    row = batch * heads + head
    token, lane, place_in = first + tl.arange(0, C), tl.arange(0, BLOCK_D), tl.arange(0, C)
    there = token < length
    keys = load_rows(k + batch * k_b + head * k_h, token, lane, k_t, k_d, there, D, False)
    total, since, _, _ = decays(sums, row, first, length, C)
    fading = fading_of(total) * reciprocal(keys)[None, :]
    inverse = load_tile(solver + (row * blocks + first // C) * C * C, place_in, place_in, C, C)
    share = tl.load(written + row * length + token, mask=there, other=0.0)
    nothing = tl.zeros([C, BLOCK_D], tl.float32)
    reads = dot(tl.trans(inverse * share[:, None]), keys, nothing, SHORT, PRECISION)
    store_tile(asked + row * length * D, reads, token, lane, length, D)
    q += batch * q_b + head * GROUPS * q_h
    grad += batch * g_b + head * GROUPS * g_h
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        slope = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        found = tl.zeros([C, BLOCK_V], tl.float32)
        for group in range(GROUPS):
            queries = load_rows(q + group * q_h, token, lane, q_t, q_d, there, D, False)
            given = load_rows(grad + group * g_h, token, column, g_t, g_d, there, V, False)
            ask = reciprocal(queries) * scale
            score = dot(queries, tl.trans(keys), tl.zeros([C, C], tl.float32), SHORT, PRECISION)
            score *= fading * ask[:, None]
            found = dot(tl.trans(score), given, found, SHORT, PRECISION)
            given = given.to(tl.float32) * (ask * since)[:, None]
            slope = dot(tl.trans(queries), given, slope, SHORT, PRECISION)
        store_tile(slopes + (row * blocks + first // C) * D * V, slope, lane, column, D, V)
        found = dot(tl.trans(inverse), found, tl.zeros_like(found), SHORT, PRECISION)
        store_tile(back + row * length * V, found, token, column, length, V)


@triton.jit(do_not_specialize=["blocks", "length", "heads"])
def gradients_kernel(
    q, k, v, beta, gates, grad, sums,
    states, new,  # S, u
    slopes, back,  # dS′, y
    dq, dk, dv, dbeta, dgates,
    blocks, length, heads, scale,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, g_b, g_h, g_t, g_d,
    FLOOR: tl.constexpr,
    GROUPS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of all inputs, for a chunk and a head of keys.

    G_i multiplies all that row i reads, and G_j divides all that row j writes: its gradient is
    what q and k have in common with their gradients as readers, less that of k as a writer. What
    a chunk's tokens exchange cancels there, and to the last bit: both sides take the same products.
    """
    batch, head, first = place(blocks, heads, C)
    row = batch * heads + head
    token, lane, place_in = first + tl.arange(0, C), tl.arange(0, BLOCK_D), tl.arange(0, C)
    there = token < length
    keys = load_rows(k + batch * k_b + head * k_h, token, lane, k_t, k_d, there, D, False)
    share = reciprocal(keys)
    norm = 1 / share
    rate = tl.maximum(tl.load(beta + row * length + token, mask=there, other=0.0), TINY)
    total, since, left, kept = decays(sums, row, first, length, C)
    fading = fading_of(total) * share[None, :]
    v += batch * v_b + head * v_h
    q += batch * q_b + head * GROUPS * q_h
    grad += batch * g_b + head * GROUPS * g_h
    dq += (batch * heads + head) * GROUPS * length * D
    new += row * length * V
    back += row * length * V
    states += (row * blocks + first // C) * D * V
    slopes += (row * blocks + first // C) * D * V

    mixing = tl.zeros([C, C], tl.float32)
    nothing = tl.zeros([C, BLOCK_D], tl.float32)
    reading = nothing
    dkeys = nothing
    by_rate = tl.zeros([C], tl.float32)
    carried = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        u = load_tile(new, token, column, length, V)
        y = load_tile(back, token, column, length, V)
        mixing = dot(y, tl.trans(u), mixing, SHORT, PRECISION)
        wide = y.to(tl.float32)
        store_tile(dv + row * length * V, wide * rate[:, None], token, column, length, V)
        values = load_rows(v, token, column, v_t, v_d, there, V, False)
        by_rate += tl.sum(wide * values.to(tl.float32), 1)
        state = load_tile(states, lane, column, D, V)
        slope = load_tile(slopes, lane, column, D, V)
        carried += tl.sum(state.to(tl.float32) * slope.to(tl.float32), 1)
        reading = dot(y, tl.trans(state), reading, SHORT, PRECISION)
        dkeys = dot(u, tl.trans(slope), dkeys, SHORT, PRECISION)

    dkeys *= left[:, None]
    by_sum = -_common(dkeys, keys, share)
    ends = kept * tl.sum(carried, 0) - tl.sum(by_sum, 0)
    mixing *= fading * (rate * share)[:, None]
    mixing = tl.where(place_in[:, None] > place_in[None, :], mixing, 0.0)
    reading *= (since * rate)[:, None]
    reading += dot(mixing, keys, nothing, SHORT, PRECISION) * norm[:, None]
    common = _common(reading, keys, share)
    tl.store(dbeta + row * length + token, by_rate - common / rate, mask=there)
    by_sum -= common
    dkeys -= reading
    found = dot(tl.trans(mixing), keys, nothing, SHORT, PRECISION) * norm[:, None]
    by_sum += _common(found, keys, share)
    dkeys -= found

    for group in range(GROUPS):
        queries = load_rows(q + group * q_h, token, lane, q_t, q_d, there, D, False)
        ask = reciprocal(queries)
        score = tl.zeros([C, C], tl.float32)
        found = nothing
        for start in range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            given = load_rows(grad + group * g_h, token, column, g_t, g_d, there, V, False)
            u = load_tile(new, token, column, length, V)
            score = dot(given, tl.trans(u), score, SHORT, PRECISION)
            state = load_tile(states, lane, column, D, V)
            found = dot(given, tl.trans(state), found, SHORT, PRECISION)
        score *= fading * (scale * ask)[:, None]
        found *= (since * scale)[:, None]
        found += dot(score, keys, nothing, SHORT, PRECISION) * (1 / ask)[:, None]
        common = _common(found, queries, ask)
        by_sum += common
        found = _through_norm(found, queries, ask, common)
        store_tile(dq + group * length * D, found, token, lane, length, D)
        found = dot(tl.trans(score), queries, nothing, SHORT, PRECISION) * norm[:, None]
        by_sum -= _common(found, keys, share)
        dkeys += found

    found = _through_norm(dkeys, keys, share, _common(dkeys, keys, share))
    store_tile(dk + row * length * D, found, token, lane, length, D)
    gate = tl.load(gates + row * length + token, mask=there, other=0.0)
    by_gate = tl.cumsum(by_sum, 0, reverse=True) + ends
    by_gate = tl.where(gate < FLOOR, 0.0, by_gate)
    tl.store(dgates + row * length + token, by_gate, mask=there)
