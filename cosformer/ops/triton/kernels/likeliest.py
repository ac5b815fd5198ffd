"""The end of a greedy step: the likeliest token, and one more token counted."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["room"])
def likeliest_kernel(
    logits, chosen, token, drawn, length, position, columns, logits_b, chosen_b, room,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, ROOM: tl.constexpr,
    EARLY: tl.constexpr,  # see `early_launch`
):  # fmt: skip
    """The first of the largest logits of a row; -1 where one is NaN, or the largest not finite."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_b
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK * AT_ONCE):
        loaded = ()
        for n in tl.static_range(AT_ONCE):  # all loads go before the first is used
            here = start + n * BLOCK + lane
            loaded += (tl.load(logits + here, mask=here < columns, other=-float("inf")),)
        for n in tl.static_range(AT_ONCE):
            x = loaded[n].to(tl.float32)
            wrong = tl.where(x != x, 1, wrong)
            at = tl.where(x > best, start + n * BLOCK + lane, at)
            best = tl.maximum(best, x)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, at, columns), 0)
    real = (tl.max(wrong, 0) == 0) & (tl.abs(top) < float("inf"))
    tokens = tl.load(length + row)
    tl.store(chosen + row * chosen_b + tokens % AHEAD, tl.where(real, first, -1).to(tl.int64))
    tl.store(token + row, tl.where(real, first, 0).to(tl.int64))
    # Each program counts for its own row, and threads share the cells: all read before any writes.
    counts = tl.load(drawn + row)
    positions = tl.load(position + row)
    tl.debug_barrier()
    tl.store(drawn + row, counts + 1)
    tl.store(length + row, tokens + 1)
    moved = positions + 1
    if ROOM:
        moved = tl.minimum(moved, room - 1)
    tl.store(position + row, moved)
