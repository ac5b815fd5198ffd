"""The sine and the cosine of one angle: a reduction and two polynomials, 19 instructions on a GPU.

`tl.sin` and `tl.cos` reduce an angle twice, exactly up to 10³⁸, in some hundred instructions.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

SHARE = tl.constexpr(0.3183098861837907)  # 1/π
# π in two parts: up to 2¹³ half turns the first has so few bits that its multiples are exact.
HALF_TURN = tl.constexpr(3.140625)
REST = tl.constexpr(0.0009676535897932)
WHOLE = tl.constexpr(12582912.0)  # 3 · 2²²: the sum with it has no bits for a fraction
ONE = tl.constexpr(0x3F800000)  # 1.0 as an integer
OUTSIDE = tl.constexpr(1.6)  # just above π/2
TURN = tl.constexpr(6.283185307179586)


@triton.jit
def sine_and_cosine(angle):
    """Both in float32, within 3·10⁻⁷ for angles up to 10⁴.

    Further off the reduction errs by as much as float32 rounds the angle. From 10⁷ on, where its
    neighbours are a radian apart, results stay within ±1, and say nothing. NaN stays.
    """
    shifted = angle * SHARE + WHOLE
    half_turns = shifted - WHOLE
    x = (angle - half_turns * HALF_TURN) - half_turns * REST
    x = tl.clamp(x, -OUTSIDE, OUTSIDE, propagate_nan=tl.PropagateNan.ALL)
    odd = shifted.to(tl.int32, bitcast=True) << 31
    sign = (odd | ONE).to(tl.float32, bitcast=True)
    y = x * x
    # Of least largest error on ±π/2: 5·10⁻⁹ and 3·10⁻¹⁰.
    sine = -0.00019806548 + y * 2.5999032e-06
    sine = -0.16666657 + y * (0.008333016 + y * sine)
    cosine = -0.0013888403 + y * (2.4761808e-05 - y * 2.6075662e-07)
    cosine = -0.5 + y * (0.04166664 + y * cosine)
    return (x + x * y * sine) * sign, (1.0 + y * cosine) * sign


@triton.jit
def waves(angle, ROUGH: tl.constexpr):
    """Both, by two instructions each if ROUGH: within 2⁻²⁰, and 2⁻²² of an angle beyond π."""
    if ROUGH:
        return libdevice.fast_sinf(angle), libdevice.fast_cosf(angle)
    else:
        return sine_and_cosine(angle)


@triton.jit
def waves_of_turns(turns, ROUGH: tl.constexpr):
    """Of angles in whole turns, float64: the fraction counts, and float32 has room for no more."""
    return waves(((turns - tl.floor(turns + 0.5)) * TURN).to(tl.float32), ROUGH)
