"""Sums of sines with noise, and their gradients: terms x·Ω are made in registers, never stored.

Ω has for every token and sine the cosines of all dimensions, then the sines: 2·BLOCK_D numbers, of
which those beyond D meet zeros. The noise Z has rows in the same order, with zeros beyond D and R,
so that neither is read under a mask. Heads that share Ω and Z are `groups` in a row.
"""

import triton
import triton.language as tl

from cosformer.ops.sine_kernels import waves_of_turns
from cosformer.ops.triton.kernels.product import place, product


@triton.jit(do_not_specialize=["blocks", "length", "heads", "position_b"])
def table_kernel(
    position,  # [b, T] float64
    rate, phase,  # [h, K, D] float64, in turns
    table,  # Ω, [b, h, T, K, 2, BLOCK_D]
    blocks, length, heads, position_b,
    D: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of tokens of a head."""
    batch, head, first = place(blocks, heads, BLOCK_T)
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    there = token < length
    index = tl.load(position + batch * position_b + token, mask=there, other=0.0)[:, None]
    table += ((batch * heads + head) * length + token[:, None]) * (2 * K * BLOCK_D) + lane[None, :]
    for k in range(K):
        cells = (head * K + k) * D + lane
        by_token = tl.load(rate + cells, mask=lane < D, other=0.0)[None, :]
        ahead = tl.load(phase + cells, mask=lane < D, other=0.0)[None, :]
        sine, cosine = waves_of_turns(index * by_token + ahead, False)
        cells = table + 2 * k * BLOCK_D
        tl.store(cells, cosine.to(table.dtype.element_ty), mask=there[:, None])
        tl.store(cells + BLOCK_D, sine.to(table.dtype.element_ty), mask=there[:, None])


@triton.jit
def _member(program, blocks, members, groups, BLOCK_T: tl.constexpr):
    """The first token of a program, the head of its table, its batch and its head of x.

    Members of a batch that share a table follow each other, while it is in the cache.
    """
    member, head = program // blocks % members, program // blocks // members
    return program % blocks * BLOCK_T, head, member // groups, head * groups + member % groups


@triton.jit(do_not_specialize=["blocks", "members", "groups", "length", "table_b"])
def mix_kernel(
    x,
    table,  # [b, h, T, 2K, BLOCK_D]
    noise,  # [h, 2K·BLOCK_D, RP]
    out,  # [B, H, T, R]
    blocks, members, groups, length, table_b,
    x_b, x_h, x_t, x_d, out_b, out_h, out_t,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one head, and of columns."""
    program = tl.program_id(0).to(tl.int64)
    column = program % (RP // BLOCK_R) * BLOCK_R + tl.arange(0, BLOCK_R)
    first, shared, batch, head = _member(
        program // (RP // BLOCK_R), blocks, members, groups, BLOCK_T
    )
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    there = (token < length)[:, None]
    cells = x + batch * x_b + head * x_h + token[:, None] * x_t + lane[None, :] * x_d
    rows = tl.load(cells, mask=there & (lane[None, :] < D), other=0.0).to(tl.float32)
    table += ((batch * table_b + shared) * length + token[:, None]) * (2 * K * BLOCK_D)
    noise += (shared * (2 * K * BLOCK_D) + lane[:, None]) * RP + column[None, :]
    sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for j in range(2 * K):
        omega = tl.load(table + (j * BLOCK_D + lane[None, :]), mask=there, other=0.0)
        z = tl.load(noise + j * BLOCK_D * RP)
        sums = product((rows * omega.to(tl.float32)).to(z.dtype), z, sums)
    cells = out + batch * out_b + head * out_h + token[:, None] * out_t + column[None, :]
    tl.store(cells, sums.to(out.dtype.element_ty), mask=there & (column[None, :] < R))


@triton.jit(do_not_specialize=["blocks", "members", "groups", "length", "table_b"])
def slope_kernel(
    table, noise,
    grad,  # [B, H, T, R]
    dx,  # [B, H, T, D]
    blocks, members, groups, length, table_b,
    grad_b, grad_h, grad_t, dx_b, dx_h, dx_t,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dx = Σ_j (g Z_jᵀ)·Ω_j of a block of tokens of one head."""
    program = tl.program_id(0).to(tl.int64)
    first, shared, batch, head = _member(program, blocks, members, groups, BLOCK_T)
    token, lane = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    there = (token < length)[:, None]
    grad += batch * grad_b + head * grad_h + token[:, None] * grad_t
    table += ((batch * table_b + shared) * length + token[:, None]) * (2 * K * BLOCK_D)
    noise += (shared * (2 * K * BLOCK_D) + lane[:, None]) * RP
    sums = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    nothing = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, RP, BLOCK_R):
        column = start + tl.arange(0, BLOCK_R)[None, :]
        given = tl.load(grad + column, mask=there & (column < R), other=0.0)
        for j in range(2 * K):
            omega = tl.load(table + (j * BLOCK_D + lane[None, :]), mask=there, other=0.0)
            z = tl.load(noise + j * BLOCK_D * RP + column)
            sums += product(given, tl.trans(z), nothing) * omega.to(tl.float32)
    cells = dx + batch * dx_b + head * dx_h + token[:, None] * dx_t + lane[None, :]
    tl.store(cells, sums.to(dx.dtype.element_ty), mask=there & (lane[None, :] < D))


@triton.jit(do_not_specialize=["spans", "members", "groups", "length", "heads", "position_b"])
def learned_kernel(
    x, position, table, noise, grad,
    parts,  # [b, h, spans, K, RP/BLOCK_R, 3, BLOCK_D] float32: what each program adds
    spans, members, groups, length, heads, position_b,
    x_b, x_h, x_t, x_d, grad_b, grad_h, grad_t,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """What a sine and its cosine add to the gradients of their rate, phase and gain.

    Of rate and phase without the factor gain. dΩ = Σ (g Zᵀ)·x over `members`, which share Ω. A
    program takes SPAN blocks of tokens: several where one member has an Ω for itself.
    """
    program = tl.program_id(0).to(tl.int64)
    column = program % (RP // BLOCK_R) * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    k, row = program // (RP // BLOCK_R) % K, program // (RP // BLOCK_R) // K
    first, item, shared = (
        row % spans * (SPAN * BLOCK_T),
        row // spans // heads,
        row // spans % heads,
    )
    lane = tl.arange(0, BLOCK_D)
    x += item * x_b + shared * groups * x_h + lane[None, :] * x_d
    grad += item * grad_b + shared * groups * grad_h + column
    noise += ((shared * K + k) * (2 * BLOCK_D) + lane[:, None]) * RP + column
    by_cosine, by_sine = tl.trans(tl.load(noise)), tl.trans(tl.load(noise + BLOCK_D * RP))
    table += ((item * heads + shared) * length * K + k) * (2 * BLOCK_D) + lane[None, :]
    position += item * position_b
    nothing = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    rate, phase, gain = nothing, nothing, nothing
    for n in range(SPAN):
        token = first + n * BLOCK_T + tl.arange(0, BLOCK_T)
        there = (token < length)[:, None]
        to_cosine, to_sine = nothing, nothing
        for member in range(members if SPAN == 1 else 1):
            batch, head = (member // groups).to(tl.int64), member % groups
            cells = grad + batch * grad_b + head * grad_h + token[:, None] * grad_t
            given = tl.load(cells, mask=there & (column < R), other=0.0)
            cells = x + batch * x_b + head * x_h + token[:, None] * x_t
            rows = tl.load(cells, mask=there & (lane[None, :] < D), other=0.0).to(tl.float32)
            to_cosine += product(given, by_cosine, nothing) * rows
            to_sine += product(given, by_sine, nothing) * rows
        cells = table + token[:, None] * (2 * K * BLOCK_D)
        cosine = tl.load(cells, mask=there, other=0.0).to(tl.float32)
        sine = tl.load(cells + BLOCK_D, mask=there, other=0.0).to(tl.float32)
        index = tl.load(position + token, mask=token < length, other=0.0).to(tl.float32)[:, None]
        turned = to_sine * cosine - to_cosine * sine  # sin' = cos, cos' = −sin
        rate += turned * index
        phase += turned
        gain += to_cosine * cosine + to_sine * sine
    parts += program * (3 * BLOCK_D) + lane
    tl.store(parts, tl.sum(rate, 0))
    tl.store(parts + BLOCK_D, tl.sum(phase, 0))
    tl.store(parts + 2 * BLOCK_D, tl.sum(gain, 0))
