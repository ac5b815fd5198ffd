"""Shares of rows in the sums of columns so far, as logarithms: by torch, or one kernel each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from cosformer.ops.features.formula import formula_gradients
from cosformer.runtime import kernels_serve, on_device_of, recorded

LOWEST = -1e30
"""A logarithm that takes no part; finite, so that gradients are."""
ROWS, COLUMNS = 64, 32
"""Of a tile."""


def running_share(x: Tensor) -> Tensor:
    """x_ij − log Σ_{j ≤ t ≤ i} exp(x_tj) of `[…, n, n]` where j ≤ i, and `LOWEST` elsewhere.

    Nothing above the diagonal is read.
    """
    return (by_kernel if kernels_serve(x) else by_formula)(x)


def by_formula(x: Tensor) -> Tensor:
    future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    x = x.masked_fill(future, LOWEST)
    return (x - _logcumsumexp(x)).masked_fill(future, LOWEST)


def by_kernel(x: Tensor) -> Tensor:
    found: Tensor = _RunningShare.apply(x)
    return found


class _RunningShare(Function):
    """Derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from cosformer.ops.running_share_kernels import share_kernel

        rows = x.contiguous()
        share, sums = torch.empty_like(rows), torch.empty_like(rows)
        _launch(share_kernel, rows, share, sums, LOWEST=LOWEST)
        ctx.save_for_backward(x, sums)  # the input itself: a copy has no graph
        return share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        from cosformer.ops.running_share_kernels import slope_kernel

        x, sums = ctx.saved_tensors
        if recorded():
            return formula_gradients(by_formula, (x,), (True,), grad)[0]
        slope = torch.empty_like(sums)
        _launch(slope_kernel, x.contiguous(), sums, grad.contiguous(), slope)
        return slope


def _launch(kernel: Any, *tensors: Tensor, **constants: float) -> None:
    size = tensors[0].shape[-1]
    matrices, groups = tensors[0].numel() // size**2, -(-size // COLUMNS)
    with on_device_of(tensors[0]):
        kernel[(matrices * groups,)](
            *tensors, size, groups, ROWS=ROWS, COLUMNS=COLUMNS, **constants
        )


def _logcumsumexp(x: Tensor) -> Tensor:
    """y_i = log Σ_{t ≤ i} exp(x_t) along the rows, by sums of 1, 2, 4, … of them.

    PyTorch's has no second derivative where the incoming gradient is 0: here its result is the
    constant that keeps every exponent from overflowing.
    """
    y = x.detach().logcumsumexp(-2)
    total = (x - y).exp()  # Σ exp(x_t − y_i), of row i alone as yet
    reach = 1
    while reach < x.shape[-2]:
        share = (y[..., :-reach, :] - y[..., reach:, :]).exp()
        total = total + F.pad(share * total[..., :-reach, :], (0, 0, reach, 0))
        reach *= 2
    return y + total.log()
