"""One token of many streams, from a layer's projections to what its output projection reads."""

import triton
import triton.language as tl

from cosformer.ops.triton.kernels.step import wave


@triton.jit
def sums_token_kernel(
    rows,  # [B, columns]: q, k, v, gates and controls of a token side by side
    out,  # [B, H·V]
    key_value, key_sum,
    length,  # [B] int64
    theta,  # [1] or [H_kv] float64
    fade,  # γ [1] or [H_kv] float64
    faded,  # [B, H_kv] float64: the sum of log γ of all tokens of a stream
    norm_weight, heads, eps, norm_eps, log_most,
    row_b, out_b, theta_h, fade_h, faded_b, at_k, at_v, at_gate, at_control,
    kv_b, kv_h, kv_r, kv_k, ks_b, ks_h, ks_r,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    R: tl.constexpr, FADE: tl.constexpr,  # "" for no decay, "head" for γ, "token" for a control
    NORM: tl.constexpr, GATE: tl.constexpr,  # "" for none, "silu" or "sigmoid"
    GROUPS: tl.constexpr,  # query heads of a key head
    EARLY: tl.constexpr,  # see `early_launch`
):  # fmt: skip
    """One key head of one stream: its state is moved on, its query heads are served."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    row = (program // heads).to(tl.int64)
    rows += row * row_b
    out += row * out_b
    lane = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_V)
    in_k = lane < K
    in_v = column < V
    inside = in_k[:, None] & in_v[None, :]
    cells = row * kv_b + head * kv_h + lane[:, None] * kv_k + column[None, :]
    sums_at = key_sum + row * ks_b + head * ks_h + lane
    # All loads of the state are issued before the first wait.
    states = ()
    sums = ()
    for r in tl.static_range(R):
        states += (tl.load(key_value + r * kv_r + cells, mask=inside, other=0.0),)
        sums += (tl.load(sums_at + r * ks_r, mask=in_k, other=0.0),)
    # What only the last step, or no step, changes is read before the wait.
    angle = (tl.load(length + row).to(tl.float64) * tl.load(theta + head * theta_h)).to(tl.float32)
    waves = ()
    for r in tl.static_range(R):
        waves += (wave(angle, r),)
    left = 1.0
    if FADE == "head":
        left = tl.load(fade + head * fade_h).to(tl.float32)
    if FADE == "token":
        before = tl.load(faded + row * faded_b + head)
    if NORM:
        norm = tl.load(norm_weight + column, mask=in_v, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    keys = tl.load(rows + at_k + head * K + lane, mask=in_k, other=0.0).to(tl.float32)
    values = tl.load(rows + at_v + head * V + column, mask=in_v, other=0.0).to(tl.float32)
    queries = ()
    gates = ()
    for g in tl.static_range(GROUPS):
        mine = head * GROUPS + g
        queries += (tl.load(rows + mine * K + lane, mask=in_k, other=0.0).to(tl.float32),)
        if GATE != "":
            at = rows + at_gate + mine * V + column
            gates += (tl.load(at, mask=in_v, other=0.0).to(tl.float32),)
    keys = tl.where(keys <= 0, 0.0, keys)
    if FADE == "token":
        control = tl.load(rows + at_control + head).to(tl.float32)
        # log sigmoid without overflow on either side
        log = tl.minimum(control, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(control))) + log_most
        left = tl.exp(log)
    tl.debug_barrier()  # threads may share a cell: all read it before any writes
    if FADE == "token":
        tl.store(faded + row * faded_b + head, before + tl.maximum(log, -110.0).to(tl.float64))
    pairs = keys[:, None] * values[None, :]
    read = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    read_sum = tl.zeros([BLOCK_K], tl.float32)
    for r in tl.static_range(R):
        state = states[r] * left + waves[r] * pairs
        tl.store(key_value + r * kv_r + cells, state, mask=inside)
        read += waves[r] * state
        summed = sums[r] * left + waves[r] * keys
        tl.store(sums_at + r * ks_r, summed, mask=in_k)
        read_sum += waves[r] * summed
    for g in tl.static_range(GROUPS):
        query = tl.where(queries[g] <= 0, 0.0, queries[g])
        total = tl.maximum(tl.sum(query * read_sum, 0), eps)
        made = tl.sum(query[:, None] * read, 0) / total
        if NORM:
            made *= tl.rsqrt(tl.sum(tl.where(in_v, made * made, 0.0), 0) / V + norm_eps) * norm
        if GATE != "":
            made *= 1.0 / (1.0 + tl.exp(-gates[g]))
            if GATE == "silu":
                made *= gates[g]
        at = out + (head * GROUPS + g) * V + column
        tl.store(at, made.to(out.dtype.element_ty), mask=in_v)
