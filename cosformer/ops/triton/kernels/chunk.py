"""One chunk of a sweep: the weights of its pairs, reading the states, and adding to them.

States, vectors and ψ are tuples with one entry for each of R basis functions; an entry of ψ has a
number for every row.
"""

import triton
import triton.language as tl

from cosformer.ops.triton.kernels.tile import LOG_E


@triton.jit
def spread(psi, number, R: tl.constexpr):
    """[C, 16]: columns r and 4 + r hold ψ_r."""
    columns = tl.where(number[None, :] % 4 == 0, psi[0][:, None], 0.0)
    for r in tl.static_range(1, R):
        columns = tl.where(number[None, :] % 4 == r, psi[r][:, None], columns)
    return tl.where(number[None, :] < 8, columns, 0.0)


@triton.jit
def stack(vectors, number, R: tl.constexpr, dtype: tl.constexpr):
    """[16, E]: row 4·s + r is vector r: for s = 0 and 2 rounded, for s = 1 the rounding error."""
    rows = tl.where(number[:, None] % 4 == 0, vectors[0][None, :], 0.0)
    for r in tl.static_range(1, R):
        rows = tl.where(number[:, None] % 4 == r, vectors[r][None, :], rows)
    high = rows.to(dtype)
    rest = (rows - high.to(tl.float32)).to(dtype)
    return tl.where(
        number[:, None] // 4 == 1, rest, tl.where(number[:, None] < 12, high, 0.0).to(dtype)
    )


@triton.jit
def halves(exponent):
    """A float64 as the sum of two float32.

    One float32 is not enough: a decay that has nearly closed leaves an exponent far below 0, and
    differences of such exponents would be lost in rounding.
    """
    near = exponent.to(tl.float32)
    return near, (exponent - near.to(tl.float64)).to(tl.float32)


@triton.jit
def _power(exponent):
    """2 to the power of a float64, correct to the precision of float32."""
    near, rest = halves(exponent)
    return tl.exp2(near) * (1.0 + rest / LOG_E)


@triton.jit
def faded(decay, begin, stop, index, valid, C: tl.constexpr):
    """The decay within a chunk, from L, the sum of the logarithms of the decay at every row.

    Returns log₂ of the decay from the start of the chunk to each row, and three factors: the decay
    over the whole chunk, from its start to each row, and from each row to its end.
    """
    before = tl.load(decay + begin - 1, mask=begin > 0, other=0.0)
    whole = (tl.load(decay + tl.minimum(begin + C, stop) - 1) - before) * LOG_E
    since = (tl.load(decay + begin + index, mask=valid, other=0.0) - before) * LOG_E
    # Rows beyond the last one count as the last one, so that no exponent is above 0.
    since = tl.where(valid, since, whole)
    return since, _power(whole), _power(since), _power(whole - since)


@triton.jit
def weighed(scores, psi, since, index, R: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr):
    """Scores times w(i, j) for pairs that causality allows, else 0."""
    weights = psi[0][:, None] * psi[0][None, :]
    for r in tl.static_range(1, R):
        weights += psi[r][:, None] * psi[r][None, :]
    if REVERSE:
        meet = index[:, None] <= index[None, :]
    else:
        meet = index[:, None] >= index[None, :]
    if DECAY:
        near, rest = halves(since)
        gap = (near[:, None] - near[None, :]) + (rest[:, None] - rest[None, :])
        if REVERSE:
            gap = -gap
        weights *= tl.exp2(tl.where(meet, gap, 0.0))
    return tl.where(meet, scores * weights, 0.0)


@triton.jit
def read_states(states, x, psi, sums, R: tl.constexpr, precision: tl.constexpr):
    """`sums` plus what the states give to every row, Σ_r ψ_r(i) x_i states_r."""
    for r in tl.static_range(R):
        scaled = (x * psi[r][:, None].to(x.dtype)).to(x.dtype)
        sums = tl.dot(scaled, states[r].to(x.dtype), sums, input_precision=precision)
    return sums


@triton.jit
def read_vectors(vectors, x, psi, R: tl.constexpr):
    """Σ_r ψ_r(i) x_i·vector_r of every row, without tensor cores.

    For vectors that a sweep sums itself. Triton gives those the layout of the rows that they sum.
    Where rows lie column by column in memory, tensor cores would get an operand of 16 columns, row
    by row; the machine code that Triton 3.6 and 3.7 make of that for Hopper reads shared memory out
    of range.
    """
    found = psi[0] * tl.sum(x.to(tl.float32) * vectors[0][None, :], 1)
    for r in tl.static_range(1, R):
        found += psi[r] * tl.sum(x.to(tl.float32) * vectors[r][None, :], 1)
    return found


@triton.jit
def step_states(
    states, y, psi, z, kept, R: tl.constexpr, precision: tl.constexpr, DECAY: tl.constexpr
):
    """The states after a chunk; `kept` is the decay over the chunk."""
    found = ()
    for r in tl.static_range(R):
        state = states[r]
        if DECAY:
            state = state * kept
        scaled = (y * psi[r][:, None].to(y.dtype)).to(y.dtype)
        found += (tl.dot(tl.trans(scaled), z, state, input_precision=precision),)
    return found


@triton.jit
def step_vectors(
    vectors, psi, rows, kept, added, apart, inside,
    R: tl.constexpr, SUMMED: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """The vectors Σ_j ψ_r(j) row_j after a chunk; with SUMMED, `added` points to what it adds."""
    found = ()
    for r in tl.static_range(R):
        vector = vectors[r]
        if DECAY:
            vector = vector * kept
        if SUMMED:
            vector += tl.load(added + r * apart, mask=inside, other=0.0)
        else:
            vector += tl.sum(psi[r][:, None] * rows.to(tl.float32), 0)
        found += (vector,)
    return found
