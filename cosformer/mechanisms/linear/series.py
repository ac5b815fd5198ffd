"""Features of exp's Taylor series to second order, by torch or by one kernel each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops.features.formula import formula_gradients
from cosformer.ops.features.projected import ALIGNED, MAX_WIDTHS, STEPS, as_multiplied
from cosformer.ops.triton.tiles import padded
from cosformer.runtime import compute_dtype, kernels_serve, on_device_of, recorded

COLUMNS = 32
"""Features that a kernel makes at a time; so many numbers must divide it that all begin alike."""


def series(x: Tensor, weight: Tensor | None) -> Tensor:
    """[y_n²/√2, y_n y_m, y, 1] of y = x W/N^¼, where each pair comes once.

    The product of two such rows is 1 + s + s²/2 with s = y·y′. They are `series_width(N)` wide; a
    kernel adds zeros up to a multiple of 8.

    Args:
        x: `[B, H, T, D]`.
        weight: W, `[H, D, N]`; None: y = x/D^¼.
    """
    narrow = x.shape[-1] if weight is None else weight.shape[-1]
    return (by_kernel if is_served(x, narrow) else by_formula)(x, weight)


def series_width(narrow: int) -> int:
    """How many features so many numbers have."""
    return (narrow + 1) * (narrow + 2) // 2


def is_served(x: Tensor, narrow: int) -> bool:
    """Whether a kernel makes the series of so many numbers where x is."""
    fits = COLUMNS % narrow == 0 and x.shape[-1] <= MAX_WIDTHS.get(x.dtype, 0)
    return fits and kernels_serve(x)


def by_formula(x: Tensor, weight: Tensor | None) -> Tensor:
    y = x.to(compute_dtype(x.dtype))
    if weight is not None:
        y = y @ weight.to(y.dtype)
    narrow = y.shape[-1]
    y = y / narrow**0.25
    # By their distance around the row: halfway round, pairs would come a second time.
    pairs = [y * y.roll(-distance, -1) for distance in range(1, narrow // 2 + 1)]
    features = torch.cat([y.square() / 2**0.5, *pairs], -1)[..., : narrow * (narrow + 1) // 2]
    return torch.cat([features, y, torch.ones_like(y[..., :1])], -1).to(x.dtype)


def by_kernel(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        weight = torch.eye(x.shape[-1], device=x.device).expand(x.shape[1], -1, -1)
    features: Tensor = _Series.apply(x, weight)
    return features


class _Series(Function):
    """Derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        from cosformer.ops.series_kernels import series_kernel

        ctx.save_for_backward(x, weight)
        scale, options = _options(x, weight)
        out = x.new_empty(*x.shape[:3], options["P"])
        blocks = -(-x.shape[2] // options["BLOCK_T"])
        with on_device_of(x):
            series_kernel[(blocks * x.shape[0] * x.shape[1],)](
                x, as_multiplied(weight, x), out, blocks, x.shape[2], x.shape[1], scale,
                *x.stride(), **options,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if not recorded():
            return _gradients(x, weight, grad, ctx.needs_input_grad[1])
        needs = ctx.needs_input_grad[:2]
        wide = grad[..., : series_width(weight.shape[-1])]  # zeros may follow
        dx, dweight = formula_gradients(by_formula, (x, weight), needs, wide)
        return dx, dweight


def _gradients(
    x: Tensor, weight: Tensor, grad: Tensor, learned: bool
) -> tuple[Tensor, Tensor | None]:
    from cosformer.ops.series_kernels import series_gradient_kernel

    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    scale, options = _options(x, weight)
    batch, heads, length, _ = x.shape
    steps = min(STEPS, -(-length // options["BLOCK_T"])) if learned else 1
    blocks = -(-length // (options["BLOCK_T"] * steps))
    dx = x.new_empty(x.shape)
    count = blocks if learned else 0
    parts = x.new_empty(batch, heads, count, *weight.shape[1:], dtype=torch.float32)
    with on_device_of(x):
        series_gradient_kernel[(blocks * batch * heads,)](
            x, as_multiplied(weight, x), grad, dx, parts, blocks, length, heads, steps, scale,
            *x.stride(), *grad.stride()[:3], LEARNED=learned, **options,
        )  # fmt: skip
    return dx, parts.sum((0, 2)).to(weight.dtype) if learned else None


def _options(x: Tensor, weight: Tensor) -> tuple[float, dict[str, Any]]:
    """What y is multiplied with, and what kernels are compiled for."""
    _, width, narrow = weight.shape
    split = x.dtype == torch.bfloat16
    return narrow**-0.25, {
        "D": width,
        "N": narrow,
        "P": -(-series_width(narrow) // ALIGNED) * ALIGNED,
        "SPLIT": split,
        "BLOCK_T": 64 if split else 32,  # three products take more registers than two
        "BLOCK_C": COLUMNS,
        "BLOCK_D": padded(width),
        "BLOCK_N": padded(narrow),
        "num_warps": 2,
    }
