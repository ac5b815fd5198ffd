"""The delta rule by chunks of C tokens, its gradients, and one chain of memories for both.

With unit rows k, G the sums of gates since a chunk began, F_ij = e^(G_i−G_j) for j ≤ i, and T the
inverse of I + strictly lower part of β_i F_ij k_i·k_j, the memory S before a chunk becomes

    u = T β (v − e^G k S)      S′ = e^(G_C) S + (e^(G_C−G) k)ᵀ u      out = e^G q S + (F ⊙ q kᵀ) u

and gradients go back, with y that of β (v − e^G k S), by

    y = Tᵀ ((F ⊙ q kᵀ)ᵀ dout + e^(G_C−G) k dS′)     dS = e^(G_C) dS′ + (e^G q)ᵀ dout − (β e^G k)ᵀ y

Both are x = x₀ + a S and S′ = e^(G_C) S + r + kᵀ (f x), of which all but S is known for every chunk
before the first memory is: `carry_kernel`. Rows of q and k are divided by their norms as they are
loaded. Tensors without strides are contiguous; those of tokens are `[B, H, T, ·]`.
"""

import triton
import triton.language as tl

from cosformer.ops.triton.kernels.chunk import halves
from cosformer.ops.triton.kernels.product import product, served
from cosformer.ops.triton.kernels.tile import LOG_E, load_rows

TINY = tl.constexpr(1e-30)  # a β that gradients may be divided by
SHORTEST = tl.constexpr(1e-12)  # shorter rows are divided by that, as by torch's `normalize`


@triton.jit
def dot(a, b, into, SHORT: tl.constexpr, PRECISION: tl.constexpr):
    """`into` + a b, rounded to bfloat16 where SHORT."""
    if SHORT:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), into)
    else:
        a, b = _nearest(a.to(tl.float32), PRECISION), _nearest(b.to(tl.float32), PRECISION)
        return tl.dot(a, b, into, input_precision=PRECISION)


@triton.jit
def _nearest(a, PRECISION: tl.constexpr):
    """Makes up for tensor cores, which cut off the 13 bits that tf32 has less, unrounded."""
    if PRECISION == "tf32":
        return a * (1 + 2**-11.5)
    else:
        return a


@triton.jit
def _bounded(a, b, PRECISION: tl.constexpr):
    """a b of numbers that are 1 at most: float16 has the bits of tf32, at twice the speed."""
    nothing = tl.zeros_like(a)
    if PRECISION == "tf32":
        return tl.dot(a.to(tl.float16), b.to(tl.float16), nothing)
    else:
        return tl.dot(a, b, nothing, input_precision=PRECISION)


@triton.jit
def _inverse(lower, PRECISION: tl.constexpr):
    """(I + lower)⁻¹ of a strictly lower triangle, 64 wide: blocks of 2, 4 … are joined in pairs.

    All numbers on the way are of inverses, 1 at most for unit keys; powers of `lower` would not be.
    """
    C: tl.constexpr = lower.shape[0]
    apart = tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]  # its highest bit: in which pair
    found = tl.where(apart == 0, 1.0, tl.where(apart == 1, -lower, 0.0))
    for level in tl.static_range(1, 6):
        between = _bounded(tl.where(apart >> level == 1, lower, 0.0), found, PRECISION)
        found -= _bounded(found, between, PRECISION)
    return found


@triton.jit
def reciprocal(tile):
    """1/|row| of each row."""
    tile = tile.to(tl.float32)
    return 1 / tl.maximum(tl.sqrt(tl.sum(tile * tile, 1)), SHORTEST)


@triton.jit
def fading_of(sums):
    """F_ij, 0 for j > i."""
    upper, lower = halves(sums)
    row = tl.arange(0, sums.shape[0])
    gap = (upper[:, None] - upper[None, :]) + (lower[:, None] - lower[None, :])
    return tl.exp2(tl.where(row[:, None] >= row[None, :], gap, float("-inf")))


@triton.jit
def decays(sums, row, first, length, C: tl.constexpr):
    """G to base 2, e^G and e^(G_C−G) of a chunk; what it leaves of the memory."""
    token = tl.minimum(first + tl.arange(0, C), length - 1)
    given = tl.load(sums + row * length + token)
    end = tl.load(sums + row * length + tl.minimum(first + C, length) - 1)
    left = tl.exp2(end.to(tl.float32))
    return given, tl.exp2(given.to(tl.float32)), tl.exp2((end - given).to(tl.float32)), left


@triton.jit
def load_tile(x, row, column, height, width):
    """A tile of a matrix `[height, width]`."""
    inside = (row[:, None] < height) & (column[None, :] < width)
    return tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(x, tile, row, column, height, width):
    inside = (row[:, None] < height) & (column >= 0)[None, :] & (column[None, :] < width)
    cells = x + row[:, None] * width + column[None, :]
    tl.store(cells, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks", "length", "heads"])
def prepare_kernel(
    k, v, beta, gates,
    sums,  # [B, H, T] float64: G, to base 2
    written,  # [B, H, T]: e^(G_C−G)/|k|
    erased,  # [B, H, T]: −β e^G/|k|, or None
    solver,  # [B, H, n, C, C]: T, or None
    answered,  # [B, H, T, D]: −T β e^G k
    own,  # [B, H, T, V]: T β v
    blocks, length, heads, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d,
    FLOOR: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What can be computed of a chunk before the memory that it begins with is known."""
    batch, head, first = served(blocks, heads, C)
    row = batch * heads + head
    token, lane = first + tl.arange(0, C), tl.arange(0, BLOCK_D)
    there = token < length
    keys = load_rows(k + batch * k_b + head * k_h, token, lane, k_t, k_d, there, D, False)
    share = reciprocal(keys)
    rate = tl.load(beta + row * length + token, mask=there, other=0.0)
    gate = tl.load(gates + row * length + token, mask=there, other=0.0)
    gate = tl.where(gate < FLOOR, FLOOR, gate).to(tl.float64) * LOG_E
    total = tl.cumsum(gate, 0)
    end = tl.sum(gate, 0)
    since = rate * share * tl.exp2(total.to(tl.float32))
    tl.store(sums + row * length + token, total, mask=there)
    left = tl.exp2((end - total).to(tl.float32))
    tl.store(written + row * length + token, left * share, mask=there)
    if erased is not None:
        tl.store(erased + row * length + token, -since, mask=there)

    zeros = tl.zeros([C, C], tl.float32)
    place_in = tl.arange(0, C)
    strict = place_in[:, None] > place_in[None, :]
    mixing = dot(keys, tl.trans(keys), zeros, SHORT, PRECISION) * fading_of(total)
    mixing *= (rate * share)[:, None] * share[None, :]
    inverse = _inverse(tl.where(strict, mixing, 0.0), PRECISION)
    if solver is not None:
        store_tile(solver + (row * blocks + first // C) * C * C, inverse, place_in, place_in, C, C)
    nothing = tl.zeros([C, BLOCK_D], tl.float32)
    reads = dot(inverse * -since[None, :], keys, nothing, SHORT, PRECISION)
    store_tile(answered + row * length * D, reads, token, lane, length, D)
    inverse *= rate[None, :]
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        values = load_rows(v + batch * v_b + head * v_h, token, column, v_t, v_d, there, V, False)
        found = dot(inverse, values, tl.zeros([C, BLOCK_V], tl.float32), SHORT, PRECISION)
        store_tile(own + row * length * V, found, token, column, length, V)


@triton.jit(do_not_specialize=["segments", "steps", "blocks", "length", "heads"])
def carry_kernel(
    k, factor, sums,
    a,  # [B, H, T, D]
    x,  # [B, H, T, V]: x₀; with WHOLE, x takes its place
    states,  # [B, H, n, D, V]: with BACK r; with WHOLE, the S before each chunk takes its place
    moves,  # [B, H, segments, D, D] float32: what a segment makes of a memory
    ends,  # [B, H, segments, D, V] float32: and adds to it
    begin,  # [B, H, D, V] float32: S before the first chunk
    last,  # [B, H, D, V] float32: S after the last
    segments, steps, blocks, length, heads, k_b, k_h, k_t, k_d,
    COLUMNS: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SHORT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x = x₀ + a S and S ← e^(G_C) S + r + kᵀ (f x), chunk after chunk, with BACK from the last on.

    A program has a segment of `steps` chunks and a block of columns. With WHOLE it begins with
    what the segments before it leave. Else it begins with 0, or, behind the columns of V, with the
    identity, whose end is what a segment makes of any memory; of a segment BACK that is transposed.
    """
    program = tl.program_id(0).to(tl.int64)
    block, segment = program % COLUMNS, program // COLUMNS % segments
    row = program // COLUMNS // segments
    lane, column = tl.arange(0, BLOCK_D), block * BLOCK_V + tl.arange(0, BLOCK_V)
    k += row // heads * k_b + row % heads * k_h
    mine = column - (V + BLOCK_V - 1) // BLOCK_V * BLOCK_V  # of the identity, where not negative
    if WHOLE:
        state = load_tile(begin + row * D * V, lane, column, D, V)
        for before in range(segments - 1 - segment if BACK else segment):
            other = row * segments + (segments - 1 - before if BACK else before)
            move = load_tile(moves + other * D * D, lane, lane, D, D)
            if BACK:
                move = tl.trans(move)
            state = product(move, state, load_tile(ends + other * D * V, lane, column, D, V))
    else:
        state = (lane[:, None] == mine[None, :]).to(tl.float32)
    chunks = tl.minimum(steps, blocks - segment * steps)
    for n in range(chunks):
        chunk = segment * steps + (chunks - 1 - n if BACK else n)
        token = chunk * C + tl.arange(0, C)
        there = token < length
        reads = load_tile(a + row * length * D, token, lane, length, D)
        keys = load_rows(k, token, lane, k_t, k_d, there, D, False)
        share = tl.load(factor + row * length + token, mask=there, other=0.0)
        end = tl.load(sums + row * length + tl.minimum(chunk * C + C, length) - 1).to(tl.float32)
        found = load_tile(x + row * length * V, token, column, length, V).to(tl.float32)
        slot = states + (row * blocks + chunk) * D * V
        if BACK:
            rest = load_tile(slot, lane, column, D, V)
        found = dot(reads, state, found, SHORT, PRECISION)
        kept = state
        state *= tl.exp2(end)
        if BACK:
            state += rest.to(tl.float32)
        if WHOLE:
            store_tile(x + row * length * V, found, token, column, length, V)
            store_tile(slot, kept, lane, column, D, V)
        state = dot(tl.trans(keys), found * share[:, None], state, SHORT, PRECISION)
    if not WHOLE:
        store_tile(ends + (row * segments + segment) * D * V, state, lane, column, D, V)
        store_tile(moves + (row * segments + segment) * D * D, state, lane, mine, D, D)
    elif segment == (0 if BACK else segments - 1):
        store_tile(last + row * D * V, state, lane, column, D, V)


@triton.jit(do_not_specialize=["blocks", "length", "heads"])
def read_kernel(
    q, k, sums, states, new,
    out,  # [B, H, T, V]
    blocks, length, heads, scale, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d,
    GROUPS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out = e^G q S + (F ⊙ q kᵀ) u of a chunk and a head of queries."""
    batch, head, first = served(blocks, heads, C)
    row = batch * (heads // GROUPS) + head // GROUPS
    token, lane = first + tl.arange(0, C), tl.arange(0, BLOCK_D)
    there = token < length
    queries = load_rows(q + batch * q_b + head * q_h, token, lane, q_t, q_d, there, D, False)
    k += batch * k_b + head // GROUPS * k_h
    keys = load_rows(k, token, lane, k_t, k_d, there, D, False)
    total, since, _, _ = decays(sums, row, first, length, C)
    ask = reciprocal(queries) * scale
    score = dot(queries, tl.trans(keys), tl.zeros([C, C], tl.float32), SHORT, PRECISION)
    score *= fading_of(total) * ask[:, None] * reciprocal(keys)[None, :]
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        state = load_tile(states + (row * blocks + first // C) * D * V, lane, column, D, V)
        found = dot(queries, state, tl.zeros([C, BLOCK_V], tl.float32), SHORT, PRECISION)
        found *= (ask * since)[:, None]
        u = load_tile(new + row * length * V, token, column, length, V)
        found = dot(score, u, found, SHORT, PRECISION)
        store_tile(out + (batch * heads + head) * length * V, found, token, column, length, V)


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
    """What can be computed of a chunk's gradients before that of its memory is known.

    A program serves a head of keys."""
    batch, head, first = served(blocks, heads, C)
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
    batch, head, first = served(blocks, heads, C)
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
