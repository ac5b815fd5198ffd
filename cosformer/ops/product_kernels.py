"""Products of tiles that are float32 in effect, and where a program's tile begins.

Float32 operands are multiplied as three tf32 products; bfloat16 ones, which tensor cores multiply
exactly, meet float32 ones that are split in two.
"""

import triton
import triton.language as tl


@triton.jit
def rest(a):
    """What rounding to bfloat16 takes away, rounded to it."""
    return (a - a.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def half_exact(a, b, into, SPLIT: tl.constexpr):
    """`into` + a b, of a in its own type and b in that or in float32."""
    if SPLIT and b.dtype == tl.bfloat16:
        return tl.dot(a, b, into)
    elif SPLIT:
        return tl.dot(a, rest(b), tl.dot(a, b.to(tl.bfloat16), into))
    else:
        return tl.dot(a.to(tl.float32), b, into, input_precision="tf32x3")


@triton.jit
def exact(a, b, into, SPLIT: tl.constexpr):
    """`into` + a b, of a in float32 and b as above."""
    if SPLIT:
        into = half_exact(a.to(tl.bfloat16), b, into, SPLIT)
        return tl.dot(rest(a), b.to(tl.bfloat16), into)
    else:
        return tl.dot(a, b, into, input_precision="tf32x3")


@triton.jit
def place(blocks, heads, BLOCK_T: tl.constexpr):
    """The batch, head and first token of a program, 64 bits each."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    return row // heads, row % heads, (program % blocks) * BLOCK_T
