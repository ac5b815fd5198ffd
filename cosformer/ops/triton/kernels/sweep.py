"""One Triton kernel for all passes of linear attention: forward, dq, dk and dv.

    out_i = Σ_j w(i, j) (x_i·y_j + a_i b_j) z_j        w(i, j) = exp(L_i − L_j) ψ(i)·ψ(j),  j ≤ i

Row i is the reader, row j the writer; there are R basis functions ψ_r. A program takes one head,
one segment of the sequence and one block of the columns of z. It goes through the segment chunk by
chunk and keeps the states Σ_j ψ_r(j) y_j z_jᵀ in registers.

| pass | x | y | z | a, b | besides |
|---|---|---|---|---|---|
| forward | φ(q) | φ(k) | v | – | divides by the same sums with z = 1, taken from Σ_j ψ_r(j) y_j |
| dq | g | v | φ(k) | δ_i, 1 | times φ′(q) |
| dk | v | g | φ(q) | 1, δ_j | in reverse, times φ′(k) |
| dv | φ(k) | φ(q) | g | – | in reverse |

g is dout divided by its row's denominator, δ the gradient of a row's total.

The denominator and the terms a_i b_j need sums that are one vector for each basis function. Where
`sums_kernel` has computed what every chunk adds to them (SUMMED), tensor cores read them as a
matrix of 16 rows. Row 4·s + r belongs to ψ_r: s = 0 is the vector rounded to 16 bits, s = 1 the
rounding error, and s = 2 the rounded vector again, which meets the rounding error of the reader.
States and vectors are tuples of length R.
"""

import triton
import triton.language as tl

from cosformer.ops.triton.kernels.chunk import (
    faded,
    read_states,
    read_vectors,
    spread,
    stack,
    step_states,
    step_vectors,
    weighed,
)
from cosformer.ops.triton.kernels.tile import (
    ROWS,
    apart,
    denominator,
    hidden,
    load_each,
    load_rows,
    relu,
    store_each,
    times,
)


@triton.jit(
    do_not_specialize=["length", "segment_length", "segments", "x_group", "y_group", "z_group"]
)
def sweep_kernel(
    x, y, z, gate, out,
    total,  # [B, H, T] float32: the sums that forward divides by
    scale,  # [B, H, T], in the type of products: g = dout · scale
    column,  # [B, H, T] float32: δ
    basis,  # [b, h, T, R] float32: ψ at every row; query and key i of a chunk share it
    table,  # dq: [B, H, T, 16] δψ; dk: [b, h, T, 16] ψ; its columns multiply the rows of `stack`
    added,  # [B, H, chunks, R, WIDE] float32: what each chunk adds to the vectors
    tile,  # [b, h, C, C]: 1 − ψ(i)·ψ(j) for pairs that causality allows, else 1
    decay,  # [b, h, T] float64: L
    key_mask,  # [B, T] bool
    bounds,  # [segments + 1] int64: where packed sequences begin and end
    first, first_vector, last, last_vector,  # states [B, H, segments, R, K, N] and their vectors
    dots,  # [B, H, T, blocks] float32: φ(row)·gradient
    heads, length, segment_length, segments, blocks, x_group, y_group, z_group, eps,
    x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, z_b, z_h, z_t, z_d, g_b, g_h, g_t, g_d,
    o_b, o_h, o_t, o_d,
    basis_b, basis_h, table_b, table_h, added_h, tile_b, tile_h, decay_b, decay_h, mask_b,
    state_h, state_s, state_r, state_k, state_n, vector_r, vector_e,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
    # READ: compute the output; WRITE: add to the state; CAUSAL: also pairs within a chunk
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

    # Vectors have the width K of y for the denominator, and N of z for a and b.
    sixteen = tl.arange(0, ROWS)
    BLOCK_E: tl.constexpr = BLOCK_K if RULE != "" else BLOCK_N  # of WIDE
    if RULE != "":
        element, elements = k_column, K
    else:
        element, elements = n_column, N
    vector_at = state_at + element * vector_e
    in_vector = element < elements

    states, vectors = (), ()
    for _ in tl.static_range(R):
        states += (tl.zeros([BLOCK_K, BLOCK_N], tl.float32),)
        vectors += (tl.zeros([BLOCK_E], tl.float32),)
    if FIRST:
        states = load_each(first + state_at + cells, state_r, inside, R)
        if VECTOR:
            vectors = load_each(first_vector + vector_at, vector_r, in_vector, R)

    chunks = ((stop - start + C - 1) // C).to(tl.int32)
    for number in range(chunks):
        if REVERSE:
            begin = start + (chunks - 1 - number) * C
        else:
            begin = start + number * C
        valid = index < stop - begin
        psi = load_each(basis + (begin + index) * R, 1, valid, R)
        if (MASKED == "reader" and READ) or (MASKED == "writer" and WRITE):
            real = tl.load(key_mask + begin + index, mask=valid, other=0) != 0
        if (COLUMN == "reader" and READ) or (COLUMN == "writer" and WRITE):
            delta = tl.load(column + row + begin + index, mask=valid, other=0.0)
        if COLUMN != "" and READ and not DECAY:
            entries = (begin + index)[:, None] * ROWS + sixteen[None, :]
            reading = tl.load(table + entries, mask=valid[:, None], other=0.0)
        if (SCALED == "x" and READ) or (SCALED != "x" and SCALED != "" and WRITE):
            by_row = tl.load(scale + row + begin + index, mask=valid, other=0.0)
        read_by, written_by, since, kept = psi, psi, 0.0, 1.0
        if DECAY:
            since, kept, from_start, to_end = faded(decay, begin, stop, index, valid, C)
            read_by = times(psi, to_end if REVERSE else from_start, R)
            written_by = times(psi, from_start if REVERSE else to_end, R)

        if READ:
            xs = load_rows(x + begin * x_t, index, k_column, x_t, x_d, valid, K, K_FULL)
            if MASKED == "reader":
                xs = hidden(xs, real)
            if X_RELU:
                xs = relu(xs)
            if SCALED == "x":
                xs = (xs * by_row[:, None]).to(xs.dtype)
        if WRITE:
            ys = load_rows(y + begin * y_t, index, k_column, y_t, y_d, valid, K, K_FULL)
            zs = load_rows(z + begin * z_t, index, n_column, z_t, z_d, valid, N, N_FULL)
            if MASKED == "writer":
                ys, zs = hidden(ys, real), hidden(zs, real)
            if Y_RELU:
                ys = relu(ys)
            if Z_RELU:
                zs = relu(zs)
            if SCALED == "y":
                ys = (ys * by_row[:, None]).to(ys.dtype)
            if SCALED == "z":
                zs = (zs * by_row[:, None]).to(zs.dtype)

        if READ:
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
                    scores = weighed(scores, psi, since, index, R, REVERSE, DECAY)
                if RULE != "":
                    row_total += tl.sum(scores, 1)
                sums = tl.dot(scores.to(zs.dtype), zs, sums, input_precision=PRECISION)
            sums = read_states(states, xs, read_by, sums, R, PRECISION)
            if RULE != "":
                if WRITE and not SUMMED:
                    row_total += read_vectors(vectors, xs, read_by, R)
                else:
                    stacked = stack(vectors, sixteen, R, xs.dtype)
                    shares = tl.dot(xs, tl.trans(stacked), input_precision=PRECISION)
                    row_total += tl.sum(shares * spread(read_by, sixteen, R), 1)
                tl.store(total + row + begin + index, row_total, mask=valid & (block == 0))
                sums *= (1.0 / denominator(row_total, eps, RULE))[:, None]
            if COLUMN != "":
                if DECAY:
                    reading = spread(read_by, sixteen, R)
                    if COLUMN == "reader":
                        reading *= delta[:, None]
                    reading = reading.to(xs.dtype)
                stacked = stack(vectors, sixteen, R, xs.dtype)
                sums = tl.dot(reading, stacked, sums, input_precision=PRECISION)
            if GATED != "":
                gates = load_rows(gate + begin * g_t, index, n_column, g_t, g_d, valid, N, N_FULL)
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
            pointers = out + begin * o_t + index[:, None] * o_t + apart(n_column, o_d)[None, :]
            written = valid[:, None] & (n_column[None, :] < N)
            tl.store(pointers, result.to(out.dtype.element_ty), mask=written)

        if WRITE:
            states = step_states(states, ys, written_by, zs, kept, R, PRECISION, DECAY)
            if VECTOR:
                new = added + (begin // C) * (R * WIDE) + element
                by = times(written_by, delta, R) if COLUMN == "writer" else written_by
                summed = ys if RULE != "" else zs
                vectors = step_vectors(
                    vectors, by, summed, kept, new, WIDE, in_vector, R, SUMMED, DECAY
                )

    if LAST:
        store_each(last + state_at + cells, state_r, states, inside, R)
        if VECTOR:
            once = in_vector
            if RULE != "":
                once = once & (block == 0)
            store_each(last_vector + vector_at, vector_r, vectors, once, R)
