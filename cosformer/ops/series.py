"""Features of exp's Taylor series to second order, by torch or by one kernel each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops.dispatch import kernels_serve
from cosformer.ops.passes import TILE, padded
from cosformer.ops.problem import on_device_of
from cosformer.ops.projected import ALIGNED
from cosformer.ops.trilinear import recorded

WIDEST = 64
"""Numbers whose products lie in registers at once."""


def series(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, x, x⊗x/√2] of x `[B, H, T, N]`; a kernel adds zeros up to a multiple of 8."""
    served = x.dtype == torch.float32 and is_served(x, x.shape[-1])
    return (by_kernel if served else by_formula)(x, dtype)


def is_served(x: Tensor, width: int) -> bool:
    """Whether a kernel makes the series of so many numbers where x is."""
    return kernels_serve(x) and width <= WIDEST


def by_formula(x: Tensor, dtype: torch.dtype) -> Tensor:
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / 2**0.5
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], -1).to(dtype)


def by_kernel(x: Tensor, dtype: torch.dtype) -> Tensor:
    features: Tensor = _Series.apply(x, dtype)
    return features


class _Series(Function):
    """Derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        from cosformer.ops.series_kernels import series_kernel

        ctx.dtype = dtype
        ctx.save_for_backward(x)
        blocks, options = _options(x)
        out = x.new_empty(*x.shape[:3], options["P"], dtype=dtype)
        with on_device_of(x):
            series_kernel[(blocks,)](x.contiguous(), out, x.shape[:3].numel(), **options)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        from cosformer.ops.series_kernels import series_gradient_kernel

        (x,) = ctx.saved_tensors
        if recorded():
            with torch.enable_grad():
                features = by_formula(x, ctx.dtype)
                grad = grad[..., : features.shape[-1]]
                return torch.autograd.grad(features, x, grad, create_graph=True)[0], None
        blocks, options = _options(x)
        dx = x.new_empty(x.shape)
        with on_device_of(x):
            series_gradient_kernel[(blocks,)](
                x.contiguous(), grad.contiguous(), dx, x.shape[:3].numel(), **options
            )
        return dx, None


def _options(x: Tensor) -> tuple[int, dict[str, int]]:
    """How many blocks of rows, and what kernels are compiled for."""
    width = x.shape[-1]
    block = padded(width, 1)
    rows = max(1, TILE // block**2)
    columns = -(-(1 + width + width**2) // ALIGNED) * ALIGNED
    return -(-x.shape[:3].numel() // rows), {
        "N": width,
        "P": columns,
        "BLOCK_T": rows,
        "BLOCK_N": block,
    }
