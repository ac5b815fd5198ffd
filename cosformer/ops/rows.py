"""What surrounds attention in a step of a model: few rows, where launches and calls are the cost.

A residual is kept apart as (x, added) until the next norm, so that a GPU adds both there.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from cosformer.ops.triton import add_norm, linear_rows, rows_serve
from cosformer.ops.triton import likeliest_serves as likeliest_serves
from cosformer.ops.triton import take_likeliest as take_likeliest
from cosformer.runtime import on_gpu

FEW = 4
"""Rows up to which a GPU multiplies a weight by all of them in one kernel of ours: above, the
products of libraries, which use tensor cores, are faster."""


class Norm(NamedTuple):
    """A layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float


def normed_linear(
    x: Tensor,
    added: Tensor | None,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + added `[rows, K]`, and gelu(norm(x + added) weightᵀ + bias) `[rows, N]`."""
    if on_gpu(x) and rows_serve(x):
        if len(x) <= FEW and added is None:
            return x, linear_rows(x, weight, bias, norm=norm, gelu=gelu)
        x, made = add_norm(x, added, norm)
    else:
        x = x if added is None else x + added
        made = F.layer_norm(x, norm.weight.shape, *norm)
    made = F.linear(made, weight, bias)
    return x, F.gelu(made) if gelu else made


def added_linear(
    x: Tensor, made: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """x `[rows, N]` and what is to be added to it: made `[rows, K]` weightᵀ + bias."""
    if not on_gpu(x):
        return x + F.linear(made, weight, bias), None
    if len(x) <= FEW and rows_serve(made):
        return linear_rows(made, weight, bias, residual=x), None
    return x, F.linear(made, weight, bias)
