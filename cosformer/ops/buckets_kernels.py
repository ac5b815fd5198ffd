"""The kernel of `buckets.py`: a program has some rows of x, and turns them once for every round."""

import triton
import triton.language as tl


@triton.jit
def _turned(rows, rotation):
    """x·R for x of 16 bits, by tensor cores: R as the sum of three numbers of as many."""
    near = rotation.to(rows.dtype)
    rest = rotation - near.to(tl.float32)
    less = rest.to(rows.dtype)
    least = (rest - less.to(tl.float32)).to(rows.dtype)
    return tl.dot(rows, near, tl.dot(rows, less, tl.dot(rows, least)))


@triton.jit(do_not_specialize=["blocks"])
def buckets_kernel(
    x,  # [B, H, n, D], of 16 bits
    rotations,  # [rounds, D, half]
    out,  # [B, H, rounds, n]: of the hashes before, and then of this one as well
    blocks, heads, length, half, by_batch, by_head, by_row, by_column,
    D: tl.constexpr, ROUNDS: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The column in which [x·R, −x·R] is largest; of equal ones the first."""
    head = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    depth, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    begin = x + head // heads * by_batch + head % heads * by_head
    cells = row[:, None].to(tl.int64) * by_row + depth[None, :] * by_column
    there = (row[:, None] < length) & (depth[None, :] < D)
    rows = tl.load(begin + cells, mask=there, other=0.0)
    inside = (depth[:, None] < D) & (column[None, :] < half)
    for n in range(ROUNDS):
        place = rotations + (n * D + depth[:, None]) * half + column[None, :]
        turned = _turned(rows, tl.load(place, mask=inside, other=0.0))
        size = tl.where(column[None, :] < half, tl.abs(turned), -1.0)
        nearest = tl.minimum(tl.argmax(size, 1), half - 1)  # NaN is nowhere the largest
        chosen = column[None, :] == nearest[:, None]
        opposite = tl.sum(tl.where(chosen, turned, 0.0), 1) < 0
        bucket = nearest + half * opposite.to(tl.int32)
        target = out + (head * ROUNDS + n) * length + row
        if not FIRST:
            bucket += 2 * half * tl.load(target, mask=row < length, other=0)
        tl.store(target, bucket, mask=row < length)
