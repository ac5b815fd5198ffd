"""Products of tiles with nearly the accuracy of float32, and the tile of a program.

Two float32 operands are multiplied as three tf32 products. Tensor cores multiply bfloat16 exactly,
so a float32 operand beside a bfloat16 one is split into two bfloat16 ones.
"""

import triton
import triton.language as tl

UPPER_HALF = tl.constexpr(-65536)  # the bits of a float32 that make a bfloat16


@triton.jit
def product(a, b, into):
    """`into` + a b for tiles of the same type."""
    return tl.dot(a, b, into, input_precision="tf32x3")  # has no effect on 16-bit tiles


@triton.jit
def split(a):
    """A float32 as two bfloat16: its upper half, and the 8 most significant bits of the rest."""
    upper = (a.to(tl.int32, bitcast=True) & UPPER_HALF).to(tl.float32, bitcast=True)
    return upper.to(tl.bfloat16), (a - upper).to(tl.bfloat16)


@triton.jit
def half_exact(a, b, into, SPLIT: tl.constexpr):
    """`into` + a b, where b has the type of a or is float32."""
    if SPLIT and b.dtype == tl.bfloat16:
        return tl.dot(a, b, into)
    elif SPLIT:
        upper, rest = split(b)
        return tl.dot(a, rest, tl.dot(a, upper, into))
    else:
        return product(a.to(tl.float32), b, into)


@triton.jit
def rounded(a, b, into, SPLIT: tl.constexpr):
    """`into` + a b, where a is float32 and, with SPLIT, is rounded to bfloat16.

    The result will be rounded to bfloat16 as well. b is not rounded: where one row of b is much
    larger than the others, its rounding error would be that of the result.
    """
    if SPLIT:
        return half_exact(a.to(tl.bfloat16), b, into, SPLIT)
    else:
        return product(a, b, into)


@triton.jit
def place(blocks, heads, BLOCK_T: tl.constexpr):
    """The sequence, the head and the first token that a program serves, as int64."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    return row // heads, row % heads, (program % blocks) * BLOCK_T
