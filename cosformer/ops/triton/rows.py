"""Launches of what surrounds attention in a step."""

import functools

import torch
from torch import Tensor

from cosformer.ops.triton.passes import INTERPRETED
from cosformer.ops.triton.tiles import padded
from cosformer.runtime import HAS_TRITON

CONVOLVED = 512
"""Columns of a row that a program convolves."""
WIDEST = 8192
"""Numbers in a row that a program holds at once."""
FEW = 4
"""Rows up to which a program multiplies its part of a weight by all, without tensor cores."""
MANY = 64
"""Rows up to which a weight is multiplied by a kernel of ours: above, and where a weight has more
rows than `LONG`, the products of libraries are faster."""
LONG = 16384
DEEP = 128
"""Columns of x, twice as many at a time, that a product by tensor cores loads."""
STAGES = 4
"""Loads of a product by tensor cores that are under way together."""
PROGRAMS = 132
"""The fewest programs of a product: an H200 has so many multiprocessors."""


def rows_serve(x: Tensor) -> bool:
    """Whether the kernels take rows such as x `[rows, width]`."""
    there = HAS_TRITON and (x.is_cuda or INTERPRETED)
    return there and x.dtype != torch.float64 and x.shape[-1] <= WIDEST


def linear_serves(rows: int, weight: Tensor) -> bool:
    """Whether `linear_rows` takes so many rows, and is faster than a library's product."""
    by_blocks = rows <= MANY and len(weight) <= LONG and weight.dtype.itemsize == 2
    return rows <= FEW or by_blocks


def early_launch(x: Tensor) -> dict[str, bool]:
    """The arguments by which a kernel of a step may start before the one in front of it has ended.

    That is programmatic dependent launch, which GPUs have from Hopper on. Every kernel waits before
    it reads what another one of the step writes, and before it writes anything. Before it waits, it
    reads weights, and states that the last step has left: a step must therefore begin with a kernel
    that is launched as usual, as the embedding is.
    """
    early = x.is_cuda and _can_start_early(x.device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@functools.cache
def _can_start_early(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def linear_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gelu(norm(x) weightᵀ + bias) for x `[rows, K]`, weight `[N, K]`, by one kernel."""
    from cosformer.ops.triton.kernels.rows import linear_blocks_kernel, linear_rows_kernel

    rows, width = x.shape
    columns = weight.shape[0]
    out = x.new_empty(rows, columns)
    norm_weight, norm_bias, eps = (x, x, 0.0) if norm is None else norm
    tensors = (
        x, weight, x if bias is None else bias, x if residual is None else residual,
        norm_weight, norm_bias, out,
    )  # fmt: skip
    strides = (x, weight, x if residual is None else residual, out)
    numbers = (columns, eps, *(each.stride(0) for each in strides))
    ways = {
        "NORM": norm is not None, "BIAS": bias is not None, "GELU": gelu,
        "RESIDUAL": residual is not None, **early_launch(x),
    }  # fmt: skip
    if rows <= FEW:
        tile = padded(width)
        block, warps = few_shape(columns, tile)
        linear_rows_kernel[(-(-columns // block),)](
            *tensors, *numbers, K=width, ROWS=rows, BLOCK_N=block, BLOCK_K=tile, **ways,
            num_warps=warps,
        )  # fmt: skip
        return out
    block_r, block_n = block_shape(rows, columns)
    linear_blocks_kernel[(-(-columns // block_n), -(-rows // block_r))](
        *tensors, rows, *numbers, K=width, BLOCK_R=block_r, BLOCK_N=block_n,
        BLOCK_K=min(DEEP, padded(width)), STAGES=STAGES, **ways,
        num_warps=4 if block_r * block_n < 1024 else 8,
    )  # fmt: skip
    return out


def few_shape(columns: int, tile: int) -> tuple[int, int]:
    """Columns and warps of a program that multiplies few rows of this width, padded.

    There are more programs than multiprocessors, and each has enough loads under way.
    """
    block = 8 if columns > 4096 else 4 if tile <= 2048 else 2
    return block, min(8, max(1, block * tile // 1024))


def block_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a program's block: small enough that all multiprocessors have one."""
    shapes = ((32, 32), (16, 32), (16, 16))
    fitting = [shape for shape in shapes if shape[0] <= padded(rows)]
    for block_r, block_n in fitting:
        if -(-rows // block_r) * -(-columns // block_n) >= PROGRAMS:
            return block_r, block_n
    return fitting[-1]


def add_norm(
    x: Tensor, added: Tensor | None, norm: tuple[Tensor, Tensor, float]
) -> tuple[Tensor, Tensor]:
    """x + added and its layer norm, for rows `[rows, K]`, by one kernel."""
    from cosformer.ops.triton.kernels.rows import add_norm_kernel

    rows, width = x.shape
    out = x.new_empty(rows, width)
    total = x if added is None else x.new_empty(rows, width)
    add_norm_kernel[(rows,)](
        x, x if added is None else added, norm[0], norm[1], total, out, norm[2],
        x.stride(0), 0 if added is None else added.stride(0),
        K=width, BLOCK_K=padded(width), ADD=added is not None,
        num_warps=min(8, max(1, padded(width) // 256)), **early_launch(x),
    )  # fmt: skip
    return total, out


def convolve_rows(rows: Tensor, state: Tensor, taps: Tensor, bias: Tensor | None) -> None:
    """A short convolution of the first columns of rows `[B, ≥ C]`, in place, by one kernel.

    Args:
        state: `[B, width − 1, C]`, the last inputs, which move on by one.
        taps: `[width, C]` float32.
    """
    from cosformer.ops.triton.kernels.rows import convolve_kernel

    width, columns = taps.shape
    convolve_kernel[(len(rows), -(-columns // CONVOLVED))](
        rows, state, taps, taps if bias is None else bias, columns, rows.stride(0),
        state.stride(0), state.stride(1), WIDTH=width, BLOCK=CONVOLVED, BIAS=bias is not None,
        num_warps=4, **early_launch(rows),
    )  # fmt: skip
