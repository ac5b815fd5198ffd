"""Norms, linear layers and convolutions of one step of a model.

A step has few rows, so launches and calls cost more than the arithmetic.

A residual is kept apart as (x, added) until the next norm, so that a GPU adds both there.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.ops.triton import FEW, add_norm, convolve_rows, linear_rows, rows_serve
from cosformer.runtime import on_gpu


class Norm(NamedTuple):
    """A layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float


class Linear(NamedTuple):
    """A linear layer, and whether our kernels can multiply rows by it."""

    weight: Tensor  # [N, K]
    bias: Tensor | None
    kernels: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Linear":
        return cls(weight, bias, on_gpu(weight) and rows_serve(weight))


def normed_linear(
    x: Tensor, added: Tensor | None, norm: Norm, linear: Linear, *, gelu: bool = False
) -> tuple[Tensor, Tensor]:
    """x + added `[rows, K]`, and gelu(norm(x + added) weightᵀ + bias) `[rows, N]`."""
    weight, bias, kernels = linear
    if kernels:
        if added is None and len(x) <= FEW:
            return x, linear_rows(x, weight, bias, norm=norm, gelu=gelu)
        x, made = add_norm(x, added, norm)
    else:
        x = x if added is None else x + added
        made = F.layer_norm(x, norm.weight.shape, *norm)
    made = F.linear(made, weight, bias)
    return x, F.gelu(made) if gelu else made


def added_linear(x: Tensor, made: Tensor, linear: Linear) -> tuple[Tensor, Tensor | None]:
    """The sum x + (made weightᵀ + bias), as the pair (x, added) of which a GPU adds later."""
    weight, bias, kernels = linear
    if not kernels:
        return x + F.linear(made, weight, bias), None
    if len(x) <= FEW:
        return linear_rows(made, weight, bias, residual=x), None
    return x, F.linear(made, weight, bias)


def convolve(rows: Tensor, state: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Rows `[B, ≥ C]` whose first columns are convolved with the last inputs, which move on by one.

    Args:
        state: `[B, width − 1, C]`, the last inputs, changed in place.
        taps: `[width, C]`, in float32 or above.
    """
    if on_gpu(rows) and rows.dtype != torch.float64:
        convolve_rows(rows, state, taps, bias)
        return rows
    columns = taps.shape[1]
    window = torch.cat([state, rows[:, None, :columns]], 1)
    made = (window * taps).sum(1)
    state.copy_(window[:, 1:])
    made = made if bias is None else made + bias
    return torch.cat([made.to(rows.dtype), rows[:, columns:]], 1)
