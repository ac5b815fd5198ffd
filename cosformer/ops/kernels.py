"""The sweep of `sweep.py` as one Triton kernel: forward, both gradients, states in and out.

    out_i = Σ_j w(i, j) (x_i·y_j + a_i b_j) z_j        w(i, j) = exp(L_i − L_j) ψ(i)·ψ(j),  j ≤ i

A program takes one head, one segment of the sequence and one block of the columns of z. It goes
through the segment chunk by chunk with the states Σ_j ψ_r(j) y_j z_jᵀ in registers.

| pass | x | y | z | a, b | besides |
|---|---|---|---|---|---|
| forward | φ(q) | φ(k) | v | – | divides by the same sums with z = 1, taken from Σ_j ψ_r(j) y_j |
| dq | g | v | φ(k) | δ_i, 1 | times φ′(q) |
| dk | v | g | φ(q) | 1, δ_j | in reverse, times φ′(k) |
| dv | φ(k) | φ(q) | g | – | in reverse |

Sums that are one vector per basis function (the denominator's, and those of a and b) go through
the tensor cores too, as products with 16 columns, of which 4·s + r belongs to ψ_r: s = 0 is its
16-bit rounding, s = 1 the rest, for neighbours round alike and their errors would add up.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(16)


@triton.jit
def _relu(x):  # type: ignore[no-untyped-def]
    """max(x, 0), NaN kept. Two bfloat16 at a time: alone they would go through float32."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0; max.NaN.bf16x2 $0, $1, z; }",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(x <= 0, 0.0, x)


@triton.jit
def _load(rows, index, column, stride, column_stride, valid, width, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [C, W] of rows; zeros beyond the segment and the width.

    float16 becomes float32, multiplied as tf32: as precise, and sums do not overflow.
    """
    places = rows + index[:, None] * stride + column[None, :] * column_stride
    if FULL:
        tile = tl.load(places, mask=valid[:, None], other=0.0)
    else:
        tile = tl.load(places, mask=valid[:, None] & (column[None, :] < width), other=0.0)
    if tile.dtype == tl.float16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _spread(p0, p1, p2, number, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """[C, 16]: column 4·s + r holds ψ_r."""
    psi = tl.where(number[None, :] % 4 == 0, p0[:, None], 0.0)
    if R > 1:
        psi = tl.where(number[None, :] % 4 == 1, p1[:, None], psi)
    if R > 2:
        psi = tl.where(number[None, :] % 4 == 2, p2[:, None], psi)
    return tl.where(number[None, :] < 8, psi, 0.0)


@triton.jit
def _in_parts(psi, number, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns below 4 rounded, the others what that leaves."""
    high = psi.to(dtype)
    return tl.where(number[None, :] < 4, high, (psi - high.to(tl.float32)).to(dtype))


@triton.jit
def _step_state(state, y, psi, z, kept, precision: tl.constexpr, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state after a chunk."""
    if DECAY:
        state = state * kept
    scaled = (y * psi[:, None].to(y.dtype)).to(y.dtype)
    return tl.dot(tl.trans(scaled), z, state, input_precision=precision)


@triton.jit
def _read_state(state, x, psi, sums, precision: tl.constexpr, POST: tl.constexpr):  # type: ignore[no-untyped-def]
    if POST:
        return sums + psi[:, None] * tl.dot(x, state.to(x.dtype), input_precision=precision)
    scaled = (x * psi[:, None].to(x.dtype)).to(x.dtype)
    return tl.dot(scaled, state.to(x.dtype), sums, input_precision=precision)


@triton.jit(
    do_not_specialize=["length", "segment_length", "segments", "x_group", "y_group", "z_group"]
)
def sweep_kernel(  # type: ignore[no-untyped-def]
    x, y, z, gate, out,
    total,  # [B, H, T] float32: the sums that forward divides by
    scale,  # [B, H, T] float32: g = dout · scale
    column,  # [B, H, T] float32: δ
    basis,  # [b, h, T, R] float32: ψ, where rows that meet within a chunk stand at one position
    table,  # [b, h, T, 16]: ψ in both parts
    delta_table,  # [B, H, T, 16]: δψ, twice
    tile,  # [b, h, C, C]: 1 − ψ(i)·ψ(j) where i meets j, else 1
    decay,  # [b, h, T] float64: L
    key_mask,  # [B, T] bool
    bounds,  # [segments + 1] int64: packed sequences
    first, first_vector, last, last_vector,  # states [B, H, segments, R, K, N] and their vectors
    dots,  # [B, H, T, blocks] float32: φ(row)·gradient
    heads, length, segment_length, segments, blocks, x_group, y_group, z_group, eps,
    x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, z_b, z_h, z_t, z_d, g_b, g_h, g_t, g_d,
    o_b, o_h, o_t, o_d,
    basis_b, basis_h, table_b, table_h, tile_b, tile_h, decay_b, decay_h, mask_b,
    state_h, state_s, state_r, state_k, state_n, vector_r, vector_e,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr,
    # READ: hand out sums; WRITE: add to the state; CAUSAL: both, and pairs within a chunk
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    RULE: tl.constexpr,  # "": no denominator
    COLUMN: tl.constexpr,  # "": none; "reader" (dq) or "writer" (dk) has δ
    SCALED: tl.constexpr,  # which of x, y, z is g
    X_RELU: tl.constexpr, Y_RELU: tl.constexpr, Z_RELU: tl.constexpr,
    GATED: tl.constexpr,  # "": not at all; "identity"; "relu"
    DECAY: tl.constexpr, MASKED: tl.constexpr,  # "": nobody; "reader"; "writer"
    PACKED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, DOTS: tl.constexpr,
    TILED: tl.constexpr, POST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = program % blocks
    segment = (program // blocks) % segments
    head = program // (blocks * segments)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    if PACKED:
        start = tl.load(bounds + segment)
        stop = tl.load(bounds + segment + 1)
    else:
        start = (segment * segment_length).to(tl.int64)
        stop = tl.minimum(start + segment_length, length)

    VECTOR: tl.constexpr = RULE != "" or COLUMN != ""
    index = tl.arange(0, C)
    k_column = tl.arange(0, BLOCK_K)
    n_column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    K_FULL: tl.constexpr = K == BLOCK_K
    N_FULL: tl.constexpr = N % BLOCK_N == 0

    x += b * x_b + (h // x_group) * x_h
    y += b * y_b + (h // y_group) * y_h
    z += b * z_b + (h // z_group) * z_h
    gate += b * g_b + (h // x_group) * g_h
    out += b * o_b + h * o_h
    basis += b * basis_b + h * basis_h
    table += b * table_b + h * table_h
    tile += b * tile_b + h * tile_h + index[:, None] * C + index[None, :]
    decay += b * decay_b + h * decay_h
    key_mask += b * mask_b
    row = head.to(tl.int64) * length
    state_at = head.to(tl.int64) * state_h + segment * state_s
    cells = k_column[:, None] * state_k + n_column[None, :] * state_n
    inside = (k_column[:, None] < K) & (n_column[None, :] < N)

    # The vector states: over K for the denominator, over N for a and b.
    sixteen = tl.arange(0, ROWS)
    basis_of = sixteen % 4
    if RULE != "":
        element, elements = k_column, K
    else:
        element, elements = n_column, N
    vector_at = basis_of[:, None] * vector_r + element[None, :] * vector_e
    in_vector = (basis_of[:, None] < R) & (element[None, :] < elements)

    s0 = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    s1 = s0
    s2 = s0
    vector = tl.zeros([ROWS, BLOCK_K if RULE != "" else BLOCK_N], tl.float32)
    if FIRST:
        s0 = tl.load(first + state_at + cells, mask=inside, other=0.0)
        if R > 1:
            s1 = tl.load(first + state_at + state_r + cells, mask=inside, other=0.0)
        if R > 2:
            s2 = tl.load(first + state_at + 2 * state_r + cells, mask=inside, other=0.0)
        if VECTOR:
            high = in_vector & (sixteen[:, None] < 4)
            vector = tl.load(first_vector + state_at + vector_at, mask=high, other=0.0)
            if COLUMN == "writer":  # both halves alike, as δψ writes them
                half = in_vector & (sixteen[:, None] < 8)
                vector = tl.load(first_vector + state_at + vector_at, mask=half, other=0.0)

    chunks = ((stop - start + C - 1) // C).to(tl.int32)
    for number in range(chunks):
        if REVERSE:
            begin = start + (chunks - 1 - number) * C
        else:
            begin = start + number * C
        valid = index < stop - begin
        psi_at = (begin + index) * R
        p0 = tl.load(basis + psi_at, mask=valid, other=0.0)
        p1, p2 = p0, p0
        if R > 1:
            p1 = tl.load(basis + psi_at + 1, mask=valid, other=0.0)
        if R > 2:
            p2 = tl.load(basis + psi_at + 2, mask=valid, other=0.0)
        if (MASKED == "reader" and READ) or (MASKED == "writer" and WRITE):
            real = tl.load(key_mask + begin + index, mask=valid, other=0) != 0
        if (COLUMN == "reader" and READ) or (COLUMN == "writer" and WRITE):
            delta = tl.load(column + row + begin + index, mask=valid, other=0.0)
        if VECTOR and not DECAY:
            places = (begin + index)[:, None] * ROWS + sixteen[None, :]
            if RULE == "" or WRITE:
                psis = tl.load(table + places, mask=valid[:, None], other=0.0)
            if (COLUMN == "reader" and READ) or (COLUMN == "writer" and WRITE):
                places += row * ROWS
                deltas = tl.load(delta_table + places, mask=valid[:, None], other=0.0)
        if (SCALED == "x" and READ) or (SCALED != "x" and SCALED != "" and WRITE):
            by_row = tl.load(scale + row + begin + index, mask=valid, other=0.0)
        if DECAY:
            before = tl.load(decay + begin - 1, mask=begin > 0, other=0.0)
            until = tl.load(decay + tl.minimum(begin + C, stop) - 1) - before
            since = (tl.load(decay + begin + index, mask=valid, other=0.0) - before).to(tl.float32)
            since = tl.where(valid, since, 0.0)
            whole = until.to(tl.float32)
            kept = tl.exp(whole)
            from_start = tl.exp(since)
            to_end = tl.exp(whole - since)
            if REVERSE:
                by_reader, by_writer = to_end, from_start
            else:
                by_reader, by_writer = from_start, to_end
        else:
            kept = 1.0

        if READ:
            xs = _load(x + begin * x_t, index, k_column, x_t, x_d, valid, K, K_FULL)
            if MASKED == "reader":
                xs = tl.where(real[:, None], xs, 0.0).to(xs.dtype)
            if X_RELU:
                xs = _relu(xs)
            if SCALED == "x":
                xs = (xs.to(tl.float32) * by_row[:, None]).to(xs.dtype)
        if WRITE:
            ys = _load(y + begin * y_t, index, k_column, y_t, y_d, valid, K, K_FULL)
            zs = _load(z + begin * z_t, index, n_column, z_t, z_d, valid, N, N_FULL)
            if MASKED == "writer":
                ys = tl.where(real[:, None], ys, 0.0).to(ys.dtype)
                zs = tl.where(real[:, None], zs, 0.0).to(zs.dtype)
            if Y_RELU:
                ys = _relu(ys)
            if Z_RELU:
                zs = _relu(zs)
            if SCALED == "y":
                ys = (ys.to(tl.float32) * by_row[:, None]).to(ys.dtype)
            if SCALED == "z":
                zs = (zs.to(tl.float32) * by_row[:, None]).to(zs.dtype)

        if READ:
            if DECAY:
                q0, q1, q2 = p0 * by_reader, p1 * by_reader, p2 * by_reader
            else:
                q0, q1, q2 = p0, p1, p2
            sums = tl.zeros([C, BLOCK_N], tl.float32)
            row_total = tl.zeros([C], tl.float32)
            if CAUSAL:
                scores = tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
                if COLUMN == "reader":
                    scores += delta[:, None]
                if COLUMN == "writer":
                    scores += delta[None, :]
                if TILED:
                    scores -= scores * tl.load(tile).to(tl.float32)
                else:
                    weights = p0[:, None] * p0[None, :]
                    if R > 1:
                        weights += p1[:, None] * p1[None, :]
                    if R > 2:
                        weights += p2[:, None] * p2[None, :]
                    if REVERSE:
                        meet = index[:, None] <= index[None, :]
                    else:
                        meet = index[:, None] >= index[None, :]
                    if DECAY:
                        if REVERSE:
                            gap = since[None, :] - since[:, None]
                        else:
                            gap = since[:, None] - since[None, :]
                        weights *= tl.exp(tl.where(meet, gap, 0.0))
                    scores = tl.where(meet, scores * weights, 0.0)
                if RULE != "":
                    row_total += tl.sum(scores, 1)
                sums = tl.dot(scores.to(zs.dtype), zs, sums, input_precision=PRECISION)
            sums = _read_state(s0, xs, q0, sums, PRECISION, POST)
            if R > 1:
                sums = _read_state(s1, xs, q1, sums, PRECISION, POST)
            if R > 2:
                sums = _read_state(s2, xs, q2, sums, PRECISION, POST)
            if RULE != "":
                shares = tl.dot(xs, tl.trans(vector.to(xs.dtype)), input_precision=PRECISION)
                row_total += tl.sum(shares * _spread(q0, q1, q2, sixteen, R), 1)
                tl.store(total + row + begin + index, row_total, mask=valid & (block == 0))
                if RULE == "clamp":
                    divisor = tl.maximum(row_total, eps)
                elif RULE == "add":
                    divisor = row_total + eps
                else:
                    away = tl.minimum(row_total, -eps)
                    divisor = tl.where(row_total < 0, away, tl.maximum(row_total, eps))
                sums *= (1.0 / divisor)[:, None]
            if COLUMN != "":
                if DECAY:
                    reading = _spread(q0, q1, q2, sixteen, R)
                    if COLUMN == "reader":
                        reading = (reading * delta[:, None]).to(xs.dtype)
                    else:
                        reading = _in_parts(reading, sixteen, xs.dtype)
                elif COLUMN == "reader":
                    reading = deltas
                else:
                    reading = psis
                sums = tl.dot(reading, vector.to(xs.dtype), sums, input_precision=PRECISION)
            if GATED != "":
                gates = _load(gate + begin * g_t, index, n_column, g_t, g_d, valid, N, N_FULL)
                if GATED == "relu":
                    sums = tl.where(gates > 0, sums, 0.0)
                if DOTS:
                    shared = tl.sum(tl.where(gates == gates, gates, 0.0).to(tl.float32) * sums, 1)
                    tl.store(dots + (row + begin + index) * blocks + block, shared, mask=valid)
            if MASKED == "reader":
                sums = tl.where(real[:, None], sums, 0.0)
            places = out + begin * o_t + index[:, None] * o_t + n_column[None, :] * o_d
            written = valid[:, None] & (n_column[None, :] < N)
            tl.store(places, sums.to(out.dtype.element_ty), mask=written)

        if WRITE:
            if DECAY:
                w0, w1, w2 = p0 * by_writer, p1 * by_writer, p2 * by_writer
            else:
                w0, w1, w2 = p0, p1, p2
            s0 = _step_state(s0, ys, w0, zs, kept, PRECISION, DECAY)
            if R > 1:
                s1 = _step_state(s1, ys, w1, zs, kept, PRECISION, DECAY)
            if R > 2:
                s2 = _step_state(s2, ys, w2, zs, kept, PRECISION, DECAY)
            if VECTOR:
                if DECAY:
                    vector *= kept
                    writing = _spread(w0, w1, w2, sixteen, R)
                    if COLUMN == "writer":
                        writing = (writing * delta[:, None]).to(ys.dtype)
                    else:
                        writing = _in_parts(writing, sixteen, ys.dtype)
                elif COLUMN == "writer":
                    writing = deltas
                else:
                    writing = psis
                if RULE != "":
                    vector = tl.dot(tl.trans(writing), ys, vector, input_precision=PRECISION)
                else:
                    vector = tl.dot(tl.trans(writing), zs, vector, input_precision=PRECISION)

    if LAST:
        tl.store(last + state_at + cells, s0, mask=inside)
        if R > 1:
            tl.store(last + state_at + state_r + cells, s1, mask=inside)
        if R > 2:
            tl.store(last + state_at + 2 * state_r + cells, s2, mask=inside)
        if VECTOR:
            # Both parts together, or one of two alike.
            pair = (basis_of[:, None] == basis_of[None, :]) & (sixteen[None, :] < 8)
            if COLUMN == "writer":
                pair = pair & (sixteen[None, :] < 4)
            both = tl.dot(pair.to(tl.float32), vector, input_precision="ieee")
            once = in_vector & (sixteen[:, None] < 4)
            if RULE != "":
                once = once & (block == 0)
            tl.store(last_vector + state_at + vector_at, both, mask=once)


@triton.jit(do_not_specialize=["rows", "length"])
def prepare_kernel(  # type: ignore[no-untyped-def]
    grad, out, total, basis, scale, column, delta_table,
    rows, heads, length, eps, basis_b, basis_h,
    g_b, g_h, g_t, g_d, o_b, o_h, o_t, o_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """scale = 1/D, δ and δψ, where δ = −(dout·out)/D · dD/dtotal, row by row."""
    row = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    valid = row < rows
    t, head = row % length, row // length
    b, h = head // heads, head % heads
    n = tl.arange(0, BLOCK_N)
    inside = valid[:, None] & (n[None, :] < N)
    at = (b * g_b + h * g_h + t * g_t)[:, None] + n[None, :] * g_d
    grads = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    at = (b * o_b + h * o_h + t * o_t)[:, None] + n[None, :] * o_d
    outs = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    row_total = tl.load(total + row, mask=valid, other=1.0)
    if RULE == "clamp":
        divisor = tl.maximum(row_total, eps)
        slope = tl.where(row_total > eps, 1.0, 0.0)
    elif RULE == "add":
        divisor = row_total + eps
        slope = 1.0
    else:
        away = tl.minimum(row_total, -eps)
        divisor = tl.where(row_total < 0, away, tl.maximum(row_total, eps))
        slope = tl.where(tl.abs(row_total) > eps, 1.0, 0.0)
    delta = -tl.sum(grads * outs, 1) / divisor * slope
    tl.store(scale + row, 1.0 / divisor, mask=valid)
    tl.store(column + row, delta, mask=valid)
    sixteen = tl.arange(0, ROWS)
    at = (b * basis_b + h * basis_h + t * R)[:, None] + sixteen[None, :] % 4
    some = valid[:, None] & (sixteen[None, :] % 4 < R) & (sixteen[None, :] < 8)
    psi = tl.load(basis + at, mask=some, other=0.0) * delta[:, None]
    at = row[:, None] * ROWS + sixteen[None, :]
    tl.store(delta_table + at, psi.to(delta_table.dtype.element_ty), mask=valid[:, None])
