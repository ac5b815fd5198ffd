"""One token of many streams; every state is updated in place."""

import triton
import triton.language as tl

# Positions stay below this. While a step runs, multiples of it are added to a position to count the
# programs that have read it.
READER = tl.constexpr(2**40)


@triton.jit
def wave(angle, r: tl.constexpr):
    """The r-th basis function at an angle."""
    if r == 0:
        return tl.cos(angle)
    else:
        return tl.sin(angle)


@triton.jit
def _take(position, heads, SHARED: tl.constexpr):
    """The position of a stream. The last program that reads it also increases it by one."""
    readers = heads
    if SHARED:
        readers = tl.num_programs(0)
    # One atomic addition reads and counts, so the last program knows that all others have read.
    found = tl.atomic_add(position, READER, sem="relaxed")
    here = found % READER
    if found // READER == readers - 1:
        tl.store(position, here + 1)
    return here


@triton.jit(do_not_specialize=["theta", "limit"])
def step_kernel(
    q, k, v, out, key_value, key_sum,
    position,  # [streams] int64, or [1] for all
    theta,  # [1] or [H] float64, or the bits of a number
    slots,  # [B] int64: the stream of each row; below 0 for a row without one
    fade,  # γ [H] or [1], or log γ of the tokens [B, H]
    faded,  # [streams, H] float64: the sum of log γ of all tokens of a stream
    limit, heads, groups, eps, position_s, theta_h, fade_b, fade_h, faded_s, faded_h,
    q_b, q_h, q_d, k_b, k_h, k_d, v_b, v_h, v_d, o_b, o_h, o_d,
    kv_s, kv_h, kv_r, kv_k, kv_v, ks_s, ks_h, ks_r, ks_k,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    R: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr,
    CHECKED: tl.constexpr, NUMBER: tl.constexpr,
    FADE: tl.constexpr,  # "" for no decay, "head" for γ, "token" for log γ
):  # fmt: skip
    """One token of one key head: updates sums and states, serves the query heads that share it."""
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    row = (program // heads).to(tl.int64)
    stream = row
    if SLOTS:
        stream = tl.load(slots + row).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    in_k = lane < K
    q += row * q_b + head * groups * q_h + lane * q_d
    out += row * o_b + head * groups * o_h
    key_value += stream * kv_s + head * kv_h
    if stream < 0:
        for start in range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            for g in range(groups):
                nothing = tl.zeros([BLOCK_V], out.dtype.element_ty)
                tl.store(out + g * o_h + column * o_d, nothing, mask=column < V)
    else:
        if NUMBER:
            turn = theta.to(tl.int64).to(tl.float64, bitcast=True)
        else:
            turn = tl.load(theta + head * theta_h)
        left = 1.0
        if FADE == "head":
            left = tl.load(fade + head * fade_h).to(tl.float32)
        if FADE == "token":
            gate = tl.load(fade + row * fade_b + head * fade_h).to(tl.float64)
            left = tl.exp(gate).to(tl.float32)
            sum_of_stream = faded + stream * faded_s + head * faded_h
            before = tl.load(sum_of_stream)
            tl.debug_barrier()  # threads share the cell
            # below it e^gate is 0, and the sum would be −inf
            tl.store(sum_of_stream, before + tl.maximum(gate, -110.0))
        keys = tl.load(k + row * k_b + head * k_h + lane * k_d, mask=in_k, other=0.0)
        keys = keys.to(tl.float32)
        keys = tl.where(keys <= 0, 0.0, keys)
        key_sums = key_sum + stream * ks_s + head * ks_h + lane * ks_k
        sums = ()
        for r in tl.static_range(R):
            sums += (tl.load(key_sums + r * ks_r, mask=in_k, other=0.0),)
        read_sum = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.static_range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            in_v = column < V
            inside = in_k[:, None] & in_v[None, :]
            cells = lane[:, None] * kv_k + column[None, :] * kv_v
            # All loads are issued before the first wait, which is for the position.
            states = ()
            for r in tl.static_range(R):
                states += (tl.load(key_value + r * kv_r + cells, mask=inside, other=0.0),)
            values = tl.load(v + row * v_b + head * v_h + column * v_d, mask=in_v, other=0.0)
            pairs = keys[:, None] * values.to(tl.float32)[None, :]
            query = tl.load(q, mask=in_k, other=0.0)
            if start == 0:
                here = _take(position + stream * position_s, heads, SHARED)
                if CHECKED:  # in a CUDA graph the host cannot check: the device stops
                    here = tl.inline_asm_elementwise(
                        "{ .reg .pred p; setp.ge.s64 p, $1, $2; @p trap; mov.b64 $0, $1; }",
                        "=l,l,l", [here, limit.to(tl.int64)], tl.int64, is_pure=False, pack=1,
                    )  # fmt: skip
                angle = (here.to(tl.float64) * turn).to(tl.float32)
                tl.debug_barrier()  # threads may share a cell: all read it before any writes
                for r in tl.static_range(R):
                    psi = wave(angle, r)
                    summed = sums[r] * left + psi * keys
                    tl.store(key_sums + r * ks_r, summed, mask=in_k)
                    read_sum += psi * summed
            # Σ_r ψ_r states_r at the token's position: what every query head reads.
            read = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            for r in tl.static_range(R):
                psi = wave(angle, r)
                state = states[r] * left + psi * pairs
                tl.store(key_value + r * kv_r + cells, state, mask=inside)
                read += psi * state
            for g in range(groups):
                now = query.to(tl.float32)
                now = tl.where(now <= 0, 0.0, now)
                query = tl.load(q + (g + 1) * q_h, mask=in_k & (g + 1 < groups), other=0.0)
                total = tl.maximum(tl.sum(now * read_sum, 0), eps)
                result = tl.sum(now[:, None] * read, 0) / total
                pointers = out + g * o_h + column * o_d
                tl.store(pointers, result.to(out.dtype.element_ty), mask=in_v)
