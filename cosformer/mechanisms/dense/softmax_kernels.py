"""Softmax attention of one token of many streams to their caches.

Where `EARLY` is set, a kernel starts before the one in front of it has ended: `early_launch` of
`cosformer.ops` says what it may read before it waits.
"""

import triton
import triton.language as tl


@triton.jit
def _turned(x, cos, sin, HALF: tl.constexpr):
    """A vector [2·HALF] whose pairs (x_2n, x_2n+1) are turned by the angle n."""
    even, odd = tl.split(tl.reshape(x, (HALF, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (2 * HALF,))


@triton.jit(do_not_specialize=["held"])
def write_kernel(
    rows, queries, k_cache, v_cache, position, length, turns,
    held, heads, key_heads, row_b, at_k, at_v, k_b, k_h, k_s, v_b, v_h, v_s,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ROTARY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A head of queries, or a head of keys with its values: turned, and put where it belongs.

    Queries and keys are turned by length · turns, an angle in float64.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    head = program % (heads + key_heads)
    row = (program // (heads + key_heads)).to(tl.int64)
    rows += row * row_b
    lane = tl.arange(0, BLOCK_K)
    here = tl.load(position + row) % held
    if ROTARY:
        pair = tl.arange(0, BLOCK_K // 2)
        angle = tl.load(length + row).to(tl.float64) * tl.load(turns + pair)
        cos = tl.cos(angle).to(tl.float32)
        sin = tl.sin(angle).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(rows + head * K + lane, mask=lane < K, other=0.0).to(tl.float32)  # k follows q
    if ROTARY:
        x = _turned(x, cos, sin, BLOCK_K // 2)
    if head < heads:
        at = queries + (row * heads + head) * K + lane
        tl.store(at, x.to(queries.dtype.element_ty), mask=lane < K)
    else:
        mine = (head - heads).to(tl.int64)
        at = k_cache + row * k_b + mine * k_h + here * k_s + lane
        tl.store(at, x.to(k_cache.dtype.element_ty), mask=lane < K)
        column = tl.arange(0, BLOCK_V)
        value = tl.load(rows + at_v + mine * V + column, mask=column < V, other=0.0)
        at = v_cache + row * v_b + mine * v_h + here * v_s + column
        tl.store(at, value.to(v_cache.dtype.element_ty), mask=column < V)


@triton.jit
def part_kernel(
    queries, k_cache, v_cache, position, parts, sums, tops,
    scale, heads, groups, stretch, splits, k_b, k_h, k_s, v_b, v_h, v_s,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Softmax of a query head over a stretch of its stream's keys, not divided yet."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)  # a stream and a head
    row = program // heads
    head = (program % heads) // groups
    split = tl.program_id(1)
    end = tl.load(position + row) + 1
    first = split * stretch
    last = tl.minimum(first + stretch, end)
    lane = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_V)
    in_k = lane < K
    in_v = column < V
    if EARLY:
        tl.extra.cuda.gdc_wait()
    query = tl.load(queries + program * K + lane, mask=in_k, other=0.0).to(tl.float32) * scale
    keys = k_cache + row * k_b + head * k_h
    values = v_cache + row * v_b + head * v_h
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    made = tl.zeros([BLOCK_V], tl.float32)
    for start in range(first, last, BLOCK_S):
        at = start + tl.arange(0, BLOCK_S)
        real = at < last
        at = at.to(tl.int64)[:, None]
        k = tl.load(keys + at * k_s + lane[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
        v = tl.load(
            values + at * v_s + column[None, :], mask=real[:, None] & in_v[None, :], other=0.0
        )
        score = tl.where(real, tl.sum(k.to(tl.float32) * query[None, :], 1), -float("inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - higher)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, 0)
        made = made * shrink + tl.sum(weight[:, None] * v.to(tl.float32), 0)
        top = higher
    part = program * splits + split
    tl.store(parts + part * V + column, made, mask=in_v)
    tl.store(sums + part, total)
    tl.store(tops + part, top)


@triton.jit
def join_kernel(
    parts, sums, tops, rows, norm_weight, out, norm_eps, splits, heads, row_b, at_gate,
    V: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The output of a query head: the sum of its stretches, divided, after norm and gate."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_V)
    in_s = split < splits
    in_v = column < V
    at = program * splits + split
    top = tl.load(tops + at, mask=in_s, other=-float("inf"))
    share = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(sums + at, mask=in_s, other=0.0) * share, 0)
    part = tl.load(
        parts + at[:, None] * V + column[None, :], mask=in_s[:, None] & in_v[None, :], other=0.0
    )
    made = tl.sum(part * share[:, None], 0) / total
    if NORM:
        made *= tl.rsqrt(tl.sum(tl.where(in_v, made * made, 0.0), 0) / V + norm_eps)
        made *= tl.load(norm_weight + column, mask=in_v, other=0.0).to(tl.float32)
    if GATE != "":
        gates = rows + (program // heads) * row_b + at_gate + (program % heads) * V
        x = tl.load(gates + column, mask=in_v, other=0.0).to(tl.float32)
        made *= 1.0 / (1.0 + tl.exp(-x))
        if GATE == "silu":
            made *= x
    tl.store(out + program * V + column, made.to(out.dtype.element_ty), mask=in_v)
