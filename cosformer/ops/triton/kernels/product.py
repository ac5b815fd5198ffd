"""Products of tiles that are float32 in effect, and where a program's tile begins.

Float32 operands are multiplied as three tf32 products; bfloat16 ones, which tensor cores multiply
exactly, meet float32 ones that are split in two.
"""

import triton
import triton.language as tl

UPPER_HALF = tl.constexpr(-65536)  # of the bits of a float32: a bfloat16


@triton.jit
def product(a, b, into):
    """`into` + a b, of tiles of one type."""
    return tl.dot(a, b, into, input_precision="tf32x3")  # which says nothing of 16 bits


@triton.jit
def split(a):
    """A float32 as two bfloat16: its upper half, and the rest, of which 8 more bits count."""
    upper = (a.to(tl.int32, bitcast=True) & UPPER_HALF).to(tl.float32, bitcast=True)
    return upper.to(tl.bfloat16), (a - upper).to(tl.bfloat16)


@triton.jit
def half_exact(a, b, into, SPLIT: tl.constexpr):
    """`into` + a b, of a in its own type and b in that or in float32."""
    if SPLIT and b.dtype == tl.bfloat16:
        return tl.dot(a, b, into)
    elif SPLIT:
        upper, rest = split(b)
        return tl.dot(a, rest, tl.dot(a, upper, into))
    else:
        return product(a.to(tl.float32), b, into)


@triton.jit
def rounded(a, b, into, SPLIT: tl.constexpr):
    """`into` + a b, of a in float32, rounded to 16 bits as the sum will be, and b as above.

    b is not: where one row of it outweighs the others, its error is that of the sum.
    """
    if SPLIT:
        return half_exact(a.to(tl.bfloat16), b, into, SPLIT)
    else:
        return product(a, b, into)


@triton.jit
def place(blocks, heads, BLOCK_T: tl.constexpr):
    """The batch, head and first token of a program, 64 bits each."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    return row // heads, row % heads, (program % blocks) * BLOCK_T
