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
the tensor cores too, as products with 16 rows: row 8·p + 4·s + r belongs to ψ_r, with s the part of
ψ_r (0: rounded to 16 bits, 1: the rest) that wrote it and p the part that reads it.
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
def _both_parts(value, low, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rounded part of a float32, or what is left of it, where `low`."""
    high = value.to(dtype)
    return tl.where(low, (value - high.to(tl.float32)).to(dtype), high)


@triton.jit
def _step_state(state, y, psi, z, kept, precision: tl.constexpr, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state after a chunk."""
    if DECAY:
        state = state * kept
    scaled = (y * psi[:, None].to(y.dtype)).to(y.dtype)
    return tl.dot(tl.trans(scaled), z, state, input_precision=precision)


@triton.jit
def _read_state(state, x, psi, sums, precision: tl.constexpr):  # type: ignore[no-untyped-def]
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
    read_basis, write_basis,  # [b, h, T, R] float32
    decay,  # [b, h, T] float64: L
    key_mask,  # [B, T] bool
    bounds,  # [segments + 1] int64: packed sequences
    first, first_vector, last, last_vector,  # states [B, H, segments, R, K, N] and their vectors
    dots,  # [B, H, T, blocks] float32: φ(row)·gradient
    heads, length, segment_length, segments, blocks, x_group, y_group, z_group, eps,
    x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, z_b, z_h, z_t, z_d, g_b, g_h, g_t, g_d,
    o_b, o_h, o_t, o_d,
    read_b, read_h, write_b, write_h, decay_b, decay_h, mask_b,
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
    PRECISION: tl.constexpr,
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
    read_basis += b * read_b + h * read_h
    write_basis += b * write_b + h * write_h
    decay += b * decay_b + h * decay_h
    key_mask += b * mask_b
    row = head.to(tl.int64) * length
    state_at = head.to(tl.int64) * state_h + segment * state_s
    cells = k_column[:, None] * state_k + n_column[None, :] * state_n
    inside = (k_column[:, None] < K) & (n_column[None, :] < N)

    # The vector states: over K for the denominator, over N for a and b.
    sixteen = tl.arange(0, ROWS)
    basis_of = sixteen % 4
    low_write = (sixteen // 4) % 2 == 1
    low_read = sixteen // 8 == 1
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
            high = in_vector & (low_write[:, None] == 0)
            vector = tl.load(first_vector + state_at + vector_at, mask=high, other=0.0)

    chunks = ((stop - start + C - 1) // C).to(tl.int32)
    for number in range(chunks):
        if REVERSE:
            begin = start + (chunks - 1 - number) * C
        else:
            begin = start + number * C
        valid = index < stop - begin
        psi_at = (begin + index) * R
        if READ:
            r0 = tl.load(read_basis + psi_at, mask=valid, other=0.0)
            r1, r2 = r0, r0
            if R > 1:
                r1 = tl.load(read_basis + psi_at + 1, mask=valid, other=0.0)
            if R > 2:
                r2 = tl.load(read_basis + psi_at + 2, mask=valid, other=0.0)
        if WRITE:
            w0 = tl.load(write_basis + psi_at, mask=valid, other=0.0)
            w1, w2 = w0, w0
            if R > 1:
                w1 = tl.load(write_basis + psi_at + 1, mask=valid, other=0.0)
            if R > 2:
                w2 = tl.load(write_basis + psi_at + 2, mask=valid, other=0.0)
        if (MASKED == "reader" and READ) or (MASKED == "writer" and WRITE):
            real = tl.load(key_mask + begin + index, mask=valid, other=0) != 0
        if (COLUMN == "reader" and READ) or (COLUMN == "writer" and WRITE):
            delta = tl.load(column + row + begin + index, mask=valid, other=0.0)
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
                q0, q1, q2 = r0 * by_reader, r1 * by_reader, r2 * by_reader
            else:
                q0, q1, q2 = r0, r1, r2
            sums = tl.zeros([C, BLOCK_N], tl.float32)
            row_total = tl.zeros([C], tl.float32)
            if CAUSAL:
                scores = tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
                if COLUMN == "reader":
                    scores += delta[:, None]
                if COLUMN == "writer":
                    scores += delta[None, :]
                tile = r0[:, None] * w0[None, :]
                if R > 1:
                    tile += r1[:, None] * w1[None, :]
                if R > 2:
                    tile += r2[:, None] * w2[None, :]
                if REVERSE:
                    meet = index[:, None] <= index[None, :]
                else:
                    meet = index[:, None] >= index[None, :]
                if DECAY:
                    if REVERSE:
                        gap = since[None, :] - since[:, None]
                    else:
                        gap = since[:, None] - since[None, :]
                    tile *= tl.exp(tl.where(meet, gap, 0.0))
                scores = tl.where(meet, scores * tile, 0.0)
                if RULE != "":
                    row_total += tl.sum(scores, 1)
                sums = tl.dot(scores.to(zs.dtype), zs, sums, input_precision=PRECISION)
            sums = _read_state(s0, xs, q0, sums, PRECISION)
            if R > 1:
                sums = _read_state(s1, xs, q1, sums, PRECISION)
            if R > 2:
                sums = _read_state(s2, xs, q2, sums, PRECISION)
            if RULE != "":
                shares = tl.dot(vector.to(xs.dtype), tl.trans(xs), input_precision=PRECISION)
                # ψ at the readers by row; both written parts add up, one reading part is enough
                psi = tl.where(basis_of[:, None] == 0, q0[None, :], 0.0)
                if R > 1:
                    psi = tl.where(basis_of[:, None] == 1, q1[None, :], psi)
                if R > 2:
                    psi = tl.where(basis_of[:, None] == 2, q2[None, :], psi)
                psi = tl.where(low_read[:, None], 0.0, psi)
                row_total += tl.sum(shares * psi, 0)
                tl.store(total + row + begin + index, row_total, mask=valid & (block == 0))
                if RULE == "clamp":
                    divisor = tl.maximum(row_total, eps)
                elif RULE == "add":
                    divisor = row_total + eps
                else:
                    away = tl.minimum(row_total, -eps)
                    divisor = tl.where(row_total < 0, away, tl.maximum(row_total, eps))
                sums = sums / divisor[:, None]
            if COLUMN != "":
                psi = tl.where(basis_of[None, :] == 0, q0[:, None], 0.0)
                if R > 1:
                    psi = tl.where(basis_of[None, :] == 1, q1[:, None], psi)
                if R > 2:
                    psi = tl.where(basis_of[None, :] == 2, q2[:, None], psi)
                if COLUMN == "reader":
                    psi *= delta[:, None]
                psi = _both_parts(psi, low_read[None, :], xs.dtype)
                sums = tl.dot(psi, vector.to(xs.dtype), sums, input_precision=PRECISION)
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
                w0, w1, w2 = w0 * by_writer, w1 * by_writer, w2 * by_writer
            s0 = _step_state(s0, ys, w0, zs, kept, PRECISION, DECAY)
            if R > 1:
                s1 = _step_state(s1, ys, w1, zs, kept, PRECISION, DECAY)
            if R > 2:
                s2 = _step_state(s2, ys, w2, zs, kept, PRECISION, DECAY)
            if VECTOR:
                psi = tl.where(basis_of[:, None] == 0, w0[None, :], 0.0)
                if R > 1:
                    psi = tl.where(basis_of[:, None] == 1, w1[None, :], psi)
                if R > 2:
                    psi = tl.where(basis_of[:, None] == 2, w2[None, :], psi)
                if COLUMN == "writer":
                    psi *= delta[None, :]
                psi = _both_parts(psi, low_write[:, None], ys.dtype)
                if DECAY:
                    vector *= kept
                if RULE != "":
                    vector = tl.dot(psi, ys, vector, input_precision=PRECISION)
                else:
                    vector = tl.dot(psi, zs, vector, input_precision=PRECISION)

    if LAST:
        tl.store(last + state_at + cells, s0, mask=inside)
        if R > 1:
            tl.store(last + state_at + state_r + cells, s1, mask=inside)
        if R > 2:
            tl.store(last + state_at + 2 * state_r + cells, s2, mask=inside)
        if VECTOR:
            # Both written parts, once.
            pair = (basis_of[:, None] == basis_of[None, :]) & (low_read[None, :] == 0)
            both = tl.dot(pair.to(tl.float32), vector, input_precision="ieee")
            once = in_vector & (sixteen[:, None] < 4)
            if RULE != "":
                once = once & (block == 0)
            tl.store(last_vector + state_at + vector_at, both, mask=once)


@triton.jit(do_not_specialize=["rows", "length"])
def prepare_kernel(  # type: ignore[no-untyped-def]
    grad, out, total, scale, column,
    rows, heads, length, eps,
    g_b, g_h, g_t, g_d, o_b, o_h, o_t, o_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    """scale = 1/D and δ = −(dout·out)/D · dD/dtotal, row by row."""
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
