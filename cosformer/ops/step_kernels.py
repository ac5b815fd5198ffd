"""One token of many streams: the key sums first, then every state where it stands."""

import triton
import triton.language as tl


@triton.jit
def _psi(angle, r: tl.constexpr, RAISED: tl.constexpr):
    """The r-th basis function at an angle."""
    if RAISED:
        if r == 0:
            return 0.7071067811865476 + 0 * angle
        elif r == 1:
            return 0.7071067811865476 * tl.cos(2 * angle)
        else:
            return 0.7071067811865476 * tl.sin(2 * angle)
    elif r == 0:
        return tl.cos(angle)
    else:
        return tl.sin(angle)


@triton.jit
def advance_kernel(
    k, key_sum,
    position,  # [streams] int64, or [1] for all
    theta,  # [1] or [H] float64
    slots,  # [B] int64: which stream a row belongs to; below 0: none
    limit, heads, position_s, theta_h,
    k_b, k_h, k_d, ks_s, ks_h, ks_r, ks_k,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, R: tl.constexpr,
    RAISED: tl.constexpr, SLOTS: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """A token's keys into the key sums of its stream, all heads at once; first, the horizon."""
    row = tl.program_id(0).to(tl.int64)
    stream = row
    if SLOTS:
        stream = tl.load(slots + row).to(tl.int64)
    if stream >= 0:
        here = tl.load(position + stream * position_s)
        if CHECKED:  # where the host may not look: in a graph. The device stops.
            here = tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ge.s64 p, $1, $2; @p trap; mov.b64 $0, $1; }",
                "=l,l,l", [here, limit.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1,
            )  # fmt: skip
        head, lane = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
        inside = (head[:, None] < heads) & (lane[None, :] < K)
        turn = tl.load(theta + head * theta_h, mask=head < heads, other=0.0)
        angle = (here.to(tl.float64) * turn).to(tl.float32)[:, None]
        places = k + row * k_b + head[:, None] * k_h + lane[None, :] * k_d
        keys = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        keys = tl.where(keys <= 0, 0.0, keys)
        sums = key_sum + stream * ks_s + head[:, None] * ks_h + lane[None, :] * ks_k
        for r in tl.static_range(R):
            so_far = tl.load(sums + r * ks_r, mask=inside, other=0.0)
            tl.store(sums + r * ks_r, so_far + _psi(angle, r, RAISED) * keys, mask=inside)


@triton.jit
def step_kernel(
    q, k, v, out, key_value, key_sum, position, theta, slots,
    heads, groups, blocks, eps, position_s, theta_h,
    q_b, q_h, q_d, k_b, k_h, k_d, v_b, v_h, v_d, o_b, o_h, o_d,
    kv_s, kv_h, kv_r, kv_k, kv_v, ks_s, ks_h, ks_r, ks_k,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    R: tl.constexpr, RAISED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One token of one key head: its state in place, and the heads of q that share it."""
    program = tl.program_id(0)
    block = program % blocks
    head = (program // blocks) % heads
    row = (program // (blocks * heads)).to(tl.int64)
    stream = row
    if SLOTS:
        stream = tl.load(slots + row).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = lane < K, column < V
    out += row * o_b + head * groups * o_h + column * o_d
    if stream < 0:
        for g in range(groups):
            tl.store(out + g * o_h, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=in_v)
    else:
        here = tl.load(position + stream * position_s).to(tl.float64)
        angle = (here * tl.load(theta + head * theta_h)).to(tl.float32)
        keys = tl.load(k + row * k_b + head * k_h + lane * k_d, mask=in_k, other=0.0)
        keys = keys.to(tl.float32)
        keys = tl.where(keys <= 0, 0.0, keys)
        values = tl.load(v + row * v_b + head * v_h + column * v_d, mask=in_v, other=0.0)
        pairs = keys[:, None] * values.to(tl.float32)[None, :]
        cells = lane[:, None] * kv_k + column[None, :] * kv_v
        states = key_value + stream * kv_s + head * kv_h + cells
        key_sums = key_sum + stream * ks_s + head * ks_h + lane * ks_k
        inside = in_k[:, None] & in_v[None, :]
        # What every query reads: the states, weighed by where the token stands.
        read = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        read_sum = tl.zeros([BLOCK_K], tl.float32)
        for r in tl.static_range(R):
            psi = _psi(angle, r, RAISED)
            state = tl.load(states + r * kv_r, mask=inside, other=0.0) + psi * pairs
            tl.store(states + r * kv_r, state, mask=inside)
            read += psi * state
            read_sum += psi * tl.load(key_sums + r * ks_r, mask=in_k, other=0.0)
        for g in range(groups):
            place = q + row * q_b + (head * groups + g) * q_h + lane * q_d
            query = tl.load(place, mask=in_k, other=0.0).to(tl.float32)
            query = tl.where(query <= 0, 0.0, query)
            total = tl.sum(query * read_sum, 0)
            sums = tl.sum(query[:, None] * read, 0)
            result = sums / tl.maximum(total, eps)
            tl.store(out + g * o_h, result.to(out.dtype.element_ty), mask=in_v)
