"""Products of tiles that are float32 in effect, and which rows a program serves."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, into):
    """`into` + a b for tiles of the same type."""
    return tl.dot(a, b, into, input_precision="tf32x3")  # has no effect on 16-bit tiles


@triton.jit
def served(blocks, heads, BLOCK_T: tl.constexpr):
    """The sequence, the head and the first token that a program serves, as int64."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    return row // heads, row % heads, (program % blocks) * BLOCK_T
