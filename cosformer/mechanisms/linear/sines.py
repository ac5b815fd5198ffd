"""Sums of sines with noise, of which stochastic positions are made: by torch, or by kernels.

By torch every number of x becomes 2K terms in memory. Kernels make the terms in registers, of x and
a table of sines that a whole batch shares: for K = 5, 64 numbers in and 256 out, a batch of 8 in
bfloat16, the table has a third of the result's bytes. A sine made where it is multiplied takes some
20 instructions a term, in each of the batch; tensor cores leave time for 16, the table takes 3.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops.features.formula import formula_gradients
from cosformer.ops.features.projected import FEWEST, MAX_WIDTHS
from cosformer.ops.triton.tiles import TILE, padded
from cosformer.runtime import compute_dtype, has_room, kernels_serve, on_device_of, recorded

TABLE = 2**26
"""Numbers in a table of sines, about: longer sequences go in segments."""
SPAN = 8
"""Blocks of tokens whose gradients of sines one program sums, where no batch shares a table."""


class Sines(NamedTuple):
    """For every dimension of a head K sines, `[h, D, K]`: cos and sin of rate · n + phase."""

    rate: Tensor  # radians a token, float64
    phase: Tensor
    gain: Tensor


def mixed(x: Tensor, position: Tensor, sines: Sines, noise: Tensor) -> Tensor:
    """Σ_d x_d Σ_j Ω_j(n, d) Z_j(d)/(D R)^¼ of x `[B, H, T, D]` at positions n: `[B, H, T, R]`.

    Args:
        position: `[b, T]` float64, b is 1 or B.
        sines: of h heads, h divides H. Ω are all cosines, then all sines, by their gains.
        noise: Z, `[h, D, 2K, R]`; it has no gradient.
    """
    return (by_kernel if is_served(x) else by_formula)(x, position, sines, noise)


def is_served(x: Tensor) -> bool:
    """Whether kernels mix sines into x, and have room for their tiles."""
    return x.shape[-1] <= MAX_WIDTHS.get(x.dtype, 0) and kernels_serve(x) and has_room(x)


def by_formula(x: Tensor, position: Tensor, sines: Sines, noise: Tensor) -> Tensor:
    """Heads come first, so that a product reads Z once for the whole batch."""
    wide = x.to(compute_dtype(x.dtype))
    rate, phase, gain = (y[:, None, None] for y in sines)
    angle = rate * position[..., None, None] + phase  # [h, b, T, D, K], float64
    omega = torch.cat([angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)], -1)
    omega = omega * torch.cat([gain, gain], -1).to(wide.dtype)
    rows = wide.unflatten(1, (len(noise), -1)).transpose(0, 1)  # [h, B, groups, T, D]
    terms = rows.contiguous()[..., None] * omega[:, :, None]
    matrix = noise.to(wide.dtype).flatten(1, 2) * _scale(noise)  # [h, D·2K, R]
    sums = terms.flatten(4).flatten(1, 3) @ matrix
    return sums.unflatten(1, rows.shape[1:4]).transpose(0, 1).flatten(1, 2).to(x.dtype)


def by_kernel(x: Tensor, position: Tensor, sines: Sines, noise: Tensor) -> Tensor:
    """For 16 bits terms and Z are rounded to the dtype of x, as products read them."""
    found: Tensor = _Mixed.apply(x, *sines, position, noise)
    return found


class _Mixed(Function):
    """Derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Tensor) -> Tensor:
        ctx.save_for_backward(x, *given)
        *sines, position, noise = given
        return _mix(x, position, Sines(*sines), noise)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *sines, position, noise = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        if recorded():

            def features(x: Tensor, *sines: Tensor) -> Tensor:
                return by_formula(x, position, Sines(*sines), noise)

            return *formula_gradients(features, (x, *sines), needs, grad), None, None
        return *_gradients(x, position, Sines(*sines), noise, grad, needs), None, None


def _mix(x: Tensor, position: Tensor, sines: Sines, noise: Tensor) -> Tensor:
    from cosformer.ops.sines_kernels import mix_kernel

    options = _options(x, noise)
    z = _rows(noise, sines.gain, x.dtype, options)
    out = x.new_empty(*x.shape[:3], noise.shape[-1])
    columns = options["RP"] // options["BLOCK_R"]
    with on_device_of(x):
        for tokens, table in _tables(x, position, sines, options):
            rows, into = x[:, :, tokens], out[:, :, tokens]
            sizes = _sizes(rows, table, options)
            mix_kernel[(columns * sizes[0] * x.shape[0] * x.shape[1],)](
                rows, table, z, into, *sizes, *rows.stride(), *into.stride()[:3], **options
            )
    return out


def _gradients(
    x: Tensor, position: Tensor, sines: Sines, noise: Tensor, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Of x, rates, phases and gains, where they are needed."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    options = _options(x, noise)
    by_gain, plain = (_rows(noise, gain, x.dtype, options) for gain in (sines.gain, None))
    dx = x.new_empty(x.shape if needs[0] else 0)
    learned = torch.zeros(3, *sines.gain.shape, device=x.device)
    with on_device_of(x):
        for tokens, table in _tables(x, position, sines, options):
            rows, given = x[:, :, tokens], grad[:, :, tokens]
            if needs[0]:
                _slope(table, by_gain, given, dx[:, :, tokens], options)
            if any(needs[1:]):
                learned += _learned(rows, position[:, tokens], table, plain, given, options)
    by_rate, by_phase = learned[:2] * sines.gain
    slopes = zip((dx, by_rate, by_phase, learned[2]), (x, *sines), needs, strict=True)
    return [slope.to(like.dtype) if needed else None for slope, like, needed in slopes]


def _slope(table: Tensor, z: Tensor, grad: Tensor, dx: Tensor, options: dict[str, Any]) -> None:
    """Writes the gradient of x."""
    from cosformer.ops.sines_kernels import slope_kernel

    sizes = _sizes(grad, table, options)
    slope_kernel[(sizes[0] * grad.shape[0] * grad.shape[1],)](
        table, z, grad, dx, *sizes, *grad.stride()[:3], *dx.stride()[:3], **options
    )


def _learned(
    x: Tensor, position: Tensor, table: Tensor, z: Tensor, grad: Tensor, options: dict[str, Any]
) -> Tensor:
    """The gradients of rates and phases, but for a factor that is the gain, and of gains."""
    from cosformer.ops.sines_kernels import learned_kernel

    items, heads, _, count, wide = table.shape
    tile: dict[str, Any] = {"SPAN": SPAN, "BLOCK_T": 64}
    if x.shape[0] * x.shape[1] > items * heads:  # a batch or a group shares each Ω
        narrow = {"BLOCK_R": max(FEWEST, options["BLOCK_R"] // 2)}
        tile |= narrow | {"SPAN": 1, "num_warps": 4 if options["BLOCK_D"] == FEWEST else 8}
    options = options | tile
    blocks, members, groups, length, _ = _sizes(x, table, options)
    spans, columns = -(-blocks // options["SPAN"]), options["RP"] // options["BLOCK_R"]
    parts = x.new_empty(items, heads, spans, count, columns, 3, wide // 2, dtype=torch.float32)
    learned_kernel[(items * heads * spans * count * columns,)](
        x, position, table, z, grad, parts, spans, members // items, groups, length, heads,
        position.stride(0), *x.stride(), *grad.stride()[:3], **options,
    )  # fmt: skip
    return parts.sum((0, 2, 4))[..., : x.shape[-1]].permute(2, 0, 3, 1)


def _tables(
    x: Tensor, position: Tensor, sines: Sines, options: dict[str, Any]
) -> Iterator[tuple[slice, Tensor]]:
    """Cosines and sines, `[b, h, t, K, 2·BLOCK_D]`, of a stretch of tokens at a time.

    Beside bfloat16 they are float16, whose rounding is an eighth of its own.
    """
    from cosformer.ops.sines_kernels import table_kernel

    rate, phase = ((y.double() / math.tau).mT.contiguous() for y in sines[:2])
    heads, count, width = rate.shape
    row = (count, 2 * options["BLOCK_D"])
    dtype = torch.float16 if x.dtype == torch.bfloat16 else torch.float32
    each = max(1, TABLE // (len(position) * heads * math.prod(row)))
    for first in range(0, x.shape[2], each):
        tokens = slice(first, min(first + each, x.shape[2]))
        places = position[:, tokens]
        items, length = places.shape
        table = x.new_empty(items, heads, length, *row, dtype=dtype)
        block = TILE // options["BLOCK_D"]
        blocks = -(-length // block)
        table_kernel[(items * heads * blocks,)](
            places, rate, phase, table, blocks, length, heads, places.stride(0),
            D=width, K=count, BLOCK_T=block, BLOCK_D=options["BLOCK_D"],
        )  # fmt: skip
        yield tokens, table


def _rows(
    noise: Tensor, gain: Tensor | None, dtype: torch.dtype, options: dict[str, Any]
) -> Tensor:
    """Z/(D R)^¼, by gains if they are given, as kernels read it: `[h, K, 2, BLOCK_D, RP]`."""
    heads, width, waves, columns = noise.shape
    factor = _scale(noise) if gain is None else _scale(noise) * gain.float()[:, :, None, :, None]
    z = noise.float().unflatten(2, (2, -1)) * factor  # [h, D, 2, K, R]
    shape = (heads, waves // 2, 2, options["BLOCK_D"], options["RP"])
    rows = noise.new_zeros(shape, dtype=dtype)
    rows[..., :width, :columns] = z.permute(0, 3, 2, 1, 4)
    return rows


def _scale(noise: Tensor) -> float:
    return float((noise.shape[1] * noise.shape[3]) ** -0.25)


def _sizes(x: Tensor, table: Tensor, options: dict[str, Any]) -> tuple[int, ...]:
    """blocks, members, groups, length, table_b: kernels' own words.

    The last is heads of the table from one of the batch to the next, 0 where all share it.
    """
    batch, heads, length, _ = x.shape
    groups = heads // table.shape[1]
    step = table.shape[1] if len(table) > 1 else 0
    return -(-length // options["BLOCK_T"]), batch * groups, groups, length, step


def _options(x: Tensor, noise: Tensor) -> dict[str, Any]:
    """What kernels are compiled for."""
    _, width, waves, columns = noise.shape
    deep = padded(width, FEWEST)
    block = min(2**14 // deep if x.dtype.itemsize == 2 else FEWEST, padded(columns, FEWEST))
    return {
        "D": width,
        "K": waves // 2,
        "R": columns,
        "RP": -(-columns // block) * block,
        "BLOCK_T": 128 if deep == FEWEST else 64,
        "BLOCK_D": deep,
        "BLOCK_R": block,
        "num_warps": 8,
        "num_stages": 3,
    }
