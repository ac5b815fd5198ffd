"""Launches of the norms, linear layers and convolutions of one step of a model."""

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
"""Rows up to which one kernel of ours multiplies a weight by all of them, and kernels start early:
above, products of libraries, which use tensor cores, and usual launches are faster."""


def rows_serve(x: Tensor) -> bool:
    """Whether the kernels take rows such as x `[rows, width]`."""
    there = HAS_TRITON and (x.is_cuda or INTERPRETED)
    return there and x.dtype != torch.float64 and x.shape[-1] <= WIDEST


def early_launch(x: Tensor) -> dict[str, bool]:
    """The arguments by which a kernel of a step may start before the one in front of it has ended.

    That is programmatic dependent launch, which GPUs have from Hopper on. Every kernel waits before
    it reads what another one of the step writes, and before it writes anything. Before it waits, it
    reads weights, and states that the last step has left: a step must therefore begin with a kernel
    that is launched as usual, as the embedding is.
    """
    early = len(x) <= FEW and _can_start_early(x.device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@functools.cache
def _can_start_early(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def linear_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gelu(norm(x) weightᵀ + bias) for x `[rows, K]`, weight `[N, K]`, by one kernel.

    For few rows: every program multiplies some rows of the weight by all of them.
    """
    from cosformer.ops.triton.kernels.rows import linear_rows_kernel

    rows, width = x.shape
    columns = weight.shape[0]
    out = x.new_empty(rows, columns)
    tile = padded(width)
    # More programs than multiprocessors; a thread multiplies 256 bytes of the weight by one row, or
    # 64 by four.
    block = 4 if tile <= 2048 else 2
    warps = block * tile * weight.itemsize * padded(rows, 1) // 8192
    norm_weight, norm_bias, eps = (x, x, 0.0) if norm is None else norm
    linear_rows_kernel[(-(-columns // block),)](
        x, weight, x if bias is None else bias, x if residual is None else residual,
        norm_weight, norm_bias, out, columns, eps, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        K=width, ROWS=rows, BLOCK_N=block, BLOCK_K=tile, NORM=norm is not None,
        BIAS=bias is not None, GELU=gelu, RESIDUAL=residual is not None,
        num_warps=min(8, max(1, warps)), **early_launch(x),
    )  # fmt: skip
    return out


def add_norm(
    x: Tensor, added: Tensor | None, norm: tuple[Tensor, Tensor, float]
) -> tuple[Tensor, Tensor]:
    """x + added and its layer norm, for rows `[rows, K]`, by one kernel."""
    from cosformer.ops.triton.kernels.rows import add_norm_kernel

    rows, width = x.shape
    norm_weight, norm_bias, eps = norm
    out = x.new_empty(rows, width)
    total = x if added is None else x.new_empty(rows, width)
    add_norm_kernel[(rows,)](
        x, x if added is None else added, norm_weight, norm_bias, total, out, eps,
        x.stride(0), 0 if added is None else added.stride(0),
        K=width, BLOCK_K=padded(width), ADD=added is not None,
        num_warps=min(8, max(1, padded(width) // 256)),
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
