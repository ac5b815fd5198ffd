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

Sums that are one vector per basis function (the denominator's, and those of a and b) are read
by the tensor cores too, as products with 16 rows: 4·s + r belongs to ψ_r, s = 0 the 16-bit
rounding of its vector, s = 1 the rest, s = 2 the rounding again, for the rest of what reads it.
What a chunk adds to them comes from `sums_kernel` where all segments begin at whole chunks.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(16)


@triton.jit
def _relu(x):
    """max(x, 0), NaN kept. Two bfloat16 at a time: alone they would go through float32."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0; max.NaN.bf16x2 $0, $1, z; }",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(x <= 0, 0.0, x)


@triton.jit
def _load(rows, index, column, stride, column_stride, valid, width, FULL: tl.constexpr):
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
def _spread(p0, p1, p2, number, R: tl.constexpr):
    """[C, 16]: columns r and 4 + r hold ψ_r."""
    psi = tl.where(number[None, :] % 4 == 0, p0[:, None], 0.0)
    if R > 1:
        psi = tl.where(number[None, :] % 4 == 1, p1[:, None], psi)
    if R > 2:
        psi = tl.where(number[None, :] % 4 == 2, p2[:, None], psi)
    return tl.where(number[None, :] < 8, psi, 0.0)


@triton.jit
def _stack(v0, v1, v2, number, R: tl.constexpr, dtype: tl.constexpr):
    """[16, E]: rows 4·s + r hold vector r: rounded, the rest, rounded again."""
    rows = tl.where(number[:, None] % 4 == 0, v0[None, :], 0.0)
    if R > 1:
        rows = tl.where(number[:, None] % 4 == 1, v1[None, :], rows)
    if R > 2:
        rows = tl.where(number[:, None] % 4 == 2, v2[None, :], rows)
    high = rows.to(dtype)
    rest = (rows - high.to(tl.float32)).to(dtype)
    return tl.where(
        number[:, None] // 4 == 1, rest, tl.where(number[:, None] < 12, high, 0.0).to(dtype)
    )


@triton.jit
def _add_to_vector(
    vector, psi, rows, kept, added, inside, SUMMED: tl.constexpr, DECAY: tl.constexpr
):
    """Σ_j ψ(j) row_j up to the next chunk; `added` points to what this one adds, if known."""
    if DECAY:
        vector = vector * kept
    if SUMMED:
        return vector + tl.load(added, mask=inside, other=0.0)
    else:
        return vector + tl.sum(psi[:, None] * rows.to(tl.float32), 0)


@triton.jit
def _step_state(state, y, psi, z, kept, precision: tl.constexpr, DECAY: tl.constexpr):
    """The state after a chunk."""
    if DECAY:
        state = state * kept
    scaled = (y * psi[:, None].to(y.dtype)).to(y.dtype)
    return tl.dot(tl.trans(scaled), z, state, input_precision=precision)


@triton.jit
def _read_state(state, x, psi, sums, precision: tl.constexpr):
    scaled = (x * psi[:, None].to(x.dtype)).to(x.dtype)
    return tl.dot(scaled, state.to(x.dtype), sums, input_precision=precision)


@triton.jit(
    do_not_specialize=["length", "segment_length", "segments", "x_group", "y_group", "z_group"]
)
def sweep_kernel(
    x, y, z, gate, out,
    total,  # [B, H, T] float32: the sums that forward divides by
    scale,  # [B, H, T], in the type of products: g = dout · scale
    column,  # [B, H, T] float32: δ
    basis,  # [b, h, T, R] float32: ψ, where rows that meet within a chunk stand at one position
    table,  # dq: [B, H, T, 16] δψ; dk: [b, h, T, 16] ψ; columns match the rows of `_stack`
    added,  # [B, H, chunks, R, padded E] float32: what chunks add to the vectors
    tile,  # [b, h, C, C]: 1 − ψ(i)·ψ(j) where i meets j, else 1
    decay,  # [b, h, T] float64: L
    key_mask,  # [B, T] bool
    bounds,  # [segments + 1] int64: packed sequences
    first, first_vector, last, last_vector,  # states [B, H, segments, R, K, N] and their vectors
    dots,  # [B, H, T, blocks] float32: φ(row)·gradient
    heads, length, segment_length, segments, blocks, x_group, y_group, z_group, eps,
    x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, z_b, z_h, z_t, z_d, g_b, g_h, g_t, g_d,
    o_b, o_h, o_t, o_d,
    basis_b, basis_h, table_b, table_h, added_h, tile_b, tile_h, decay_b, decay_h, mask_b,
    state_h, state_s, state_r, state_k, state_n, vector_r, vector_e,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
    # READ: hand out sums; WRITE: add to the state; CAUSAL: both, and pairs within a chunk
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    RULE: tl.constexpr,  # "": no denominator
    COLUMN: tl.constexpr,  # "": none; "reader" (dq) or "writer" (dk) has δ
    SCALED: tl.constexpr,  # which of x, y, z is g
    X_RELU: tl.constexpr, Y_RELU: tl.constexpr, Z_RELU: tl.constexpr,
    GATED: tl.constexpr,  # "": not at all; "identity"; "relu"
    DECAY: tl.constexpr, MASKED: tl.constexpr,  # "": nobody; "reader"; "writer"
    PACKED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, DOTS: tl.constexpr,
    SUMMED: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
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
    added += head.to(tl.int64) * added_h
    tile += b * tile_b + h * tile_h + index[:, None] * C + index[None, :]
    decay += b * decay_b + h * decay_h
    key_mask += b * mask_b
    row = head.to(tl.int64) * length
    state_at = head.to(tl.int64) * state_h + segment * state_s
    cells = k_column[:, None] * state_k + n_column[None, :] * state_n
    inside = (k_column[:, None] < K) & (n_column[None, :] < N)

    # The vectors: over K for the denominator, over N for a and b.
    sixteen = tl.arange(0, ROWS)
    BLOCK_E: tl.constexpr = BLOCK_K if RULE != "" else BLOCK_N  # of WIDE
    if RULE != "":
        element, elements = k_column, K
    else:
        element, elements = n_column, N
    vector_at = element * vector_e
    in_vector = element < elements

    s0 = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    s1 = s0
    s2 = s0
    v0 = tl.zeros([BLOCK_E], tl.float32)
    v1, v2 = v0, v0
    if FIRST:
        s0 = tl.load(first + state_at + cells, mask=inside, other=0.0)
        if R > 1:
            s1 = tl.load(first + state_at + state_r + cells, mask=inside, other=0.0)
        if R > 2:
            s2 = tl.load(first + state_at + 2 * state_r + cells, mask=inside, other=0.0)
        if VECTOR:
            at = first_vector + state_at + vector_at
            v0 = tl.load(at, mask=in_vector, other=0.0)
            if R > 1:
                v1 = tl.load(at + vector_r, mask=in_vector, other=0.0)
            if R > 2:
                v2 = tl.load(at + 2 * vector_r, mask=in_vector, other=0.0)

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
        if COLUMN != "" and READ and not DECAY:
            places = (begin + index)[:, None] * ROWS + sixteen[None, :]
            reading = tl.load(table + places, mask=valid[:, None], other=0.0)
        if (SCALED == "x" and READ) or (SCALED != "x" and SCALED != "" and WRITE):
            by_row = tl.load(scale + row + begin + index, mask=valid, other=0.0)
        if DECAY:
            before = tl.load(decay + begin - 1, mask=begin > 0, other=0.0)
            until = tl.load(decay + tl.minimum(begin + C, stop) - 1) - before
            since = (tl.load(decay + begin + index, mask=valid, other=0.0) - before).to(tl.float32)
            whole = until.to(tl.float32)
            since = tl.where(valid, since, whole)  # 0 would be later: an exponent above 0
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
                xs = (xs * by_row[:, None]).to(xs.dtype)
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
                ys = (ys * by_row[:, None]).to(ys.dtype)
            if SCALED == "z":
                zs = (zs * by_row[:, None]).to(zs.dtype)

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
            sums = _read_state(s0, xs, q0, sums, PRECISION)
            if R > 1:
                sums = _read_state(s1, xs, q1, sums, PRECISION)
            if R > 2:
                sums = _read_state(s2, xs, q2, sums, PRECISION)
            if RULE != "":
                vectors = _stack(v0, v1, v2, sixteen, R, xs.dtype)
                shares = tl.dot(xs, tl.trans(vectors), input_precision=PRECISION)
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
                        reading *= delta[:, None]
                    reading = reading.to(xs.dtype)
                vectors = _stack(v0, v1, v2, sixteen, R, xs.dtype)
                sums = tl.dot(reading, vectors, sums, input_precision=PRECISION)
            if GATED != "":
                gates = _load(gate + begin * g_t, index, n_column, g_t, g_d, valid, N, N_FULL)
                if DOTS:
                    mapped = gates.to(tl.float32)
                    if GATED == "relu":
                        mapped = tl.where(mapped > 0, mapped, 0.0)
                    shared = tl.sum(mapped * sums, 1)
                    if MASKED == "reader":
                        shared = tl.where(real, shared, 0.0)
                    tl.store(dots + (row + begin + index) * blocks + block, shared, mask=valid)
            result = sums.to(out.dtype.element_ty)
            if GATED == "relu":
                result = tl.where(gates > 0, result, 0.0)
            if MASKED == "reader":
                result = tl.where(real[:, None], result, 0.0)
            places = out + begin * o_t + index[:, None] * o_t + n_column[None, :] * o_d
            written = valid[:, None] & (n_column[None, :] < N)
            tl.store(places, result.to(out.dtype.element_ty), mask=written)

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
                new = added + (begin // C) * (R * WIDE) + element
                if COLUMN == "writer":
                    u0, u1, u2 = w0 * delta, w1 * delta, w2 * delta
                else:
                    u0, u1, u2 = w0, w1, w2
                if RULE != "":
                    rows = ys
                else:
                    rows = zs
                v0 = _add_to_vector(v0, u0, rows, kept, new, in_vector, SUMMED, DECAY)
                if R > 1:
                    v1 = _add_to_vector(v1, u1, rows, kept, new + WIDE, in_vector, SUMMED, DECAY)
                if R > 2:
                    v2 = _add_to_vector(
                        v2, u2, rows, kept, new + 2 * WIDE, in_vector, SUMMED, DECAY
                    )

    if LAST:
        tl.store(last + state_at + cells, s0, mask=inside)
        if R > 1:
            tl.store(last + state_at + state_r + cells, s1, mask=inside)
        if R > 2:
            tl.store(last + state_at + 2 * state_r + cells, s2, mask=inside)
        if VECTOR:
            once = in_vector
            if RULE != "":
                once = once & (block == 0)
            at = last_vector + state_at + vector_at
            tl.store(at, v0, mask=once)
            if R > 1:
                tl.store(at + vector_r, v1, mask=once)
            if R > 2:
                tl.store(at + 2 * vector_r, v2, mask=once)


@triton.jit(do_not_specialize=["length", "group"])
def sums_kernel(
    rows, basis, column, key_mask, added,
    heads, length, chunks, group,
    r_b, r_h, r_t, r_d, basis_b, basis_h, mask_b,
    E: tl.constexpr, BLOCK_E: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, RELU: tl.constexpr, COLUMN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Σ_j ψ_r(j) row_j (or with δ_j ψ_r(j)) over each chunk."""
    program = tl.program_id(0)
    chunk, head = program % chunks, program // chunks
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    index, element = tl.arange(0, C), tl.arange(0, BLOCK_E)
    begin = chunk * C
    valid = index < length - begin
    rows += b * r_b + (h // group) * r_h + begin.to(tl.int64) * r_t
    tile = _load(rows, index, element, r_t, r_d, valid, E, E == BLOCK_E)
    if MASKED:
        real = tl.load(key_mask + b * mask_b + begin + index, mask=valid, other=0) != 0
        tile = tl.where(real[:, None], tile, 0.0).to(tile.dtype)
    if RELU:
        tile = _relu(tile)
    tile = tile.to(tl.float32)
    if COLUMN:
        delta = tl.load(column + head.to(tl.int64) * length + begin + index, mask=valid, other=0.0)
        tile *= delta[:, None]
    basis += b * basis_b + h * basis_h + (begin + index) * R
    added += program.to(tl.int64) * R * WIDE + element
    for r in tl.static_range(R):
        psi = tl.load(basis + r, mask=valid, other=0.0)
        tl.store(added + r * WIDE, tl.sum(psi[:, None] * tile, 0), mask=element < WIDE)


@triton.jit(do_not_specialize=["rows", "length"])
def prepare_kernel(
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
    # Rounded before δ is made of it, so that g·v + δ cancels as it should.
    inverse = (1.0 / divisor).to(scale.dtype.element_ty)
    delta = -tl.sum(grads * outs, 1) * inverse.to(tl.float32) * slope
    tl.store(scale + row, inverse, mask=valid)
    tl.store(column + row, delta, mask=valid)
    sixteen = tl.arange(0, ROWS)
    at = (b * basis_b + h * basis_h + t * R)[:, None] + sixteen[None, :] % 4
    some = valid[:, None] & (sixteen[None, :] % 4 < R) & (sixteen[None, :] < 8)
    psi = tl.load(basis + at, mask=some, other=0.0) * delta[:, None]
    at = row[:, None] * ROWS + sixteen[None, :]
    tl.store(delta_table + at, psi.to(delta_table.dtype.element_ty), mask=valid[:, None])
