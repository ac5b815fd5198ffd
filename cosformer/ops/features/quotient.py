"""Σ parts / Σ totals, where attention was computed in parts: by torch, or one kernel each way."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from cosformer.ops.problem.normaliser import denominator, slope
from cosformer.ops.triton.tiles import TILE, padded
from cosformer.runtime import compute_dtype, kernels_serve, on_device_of, recorded


class Division(NamedTuple):
    """How many tensors are parts, how many of their columns are divided, and by which rule."""

    parts: int
    columns: int
    rule: str
    eps: float


def quotient(
    parts: list[Tensor], totals: list[Tensor], columns: int, rule: str, eps: float
) -> Tensor:
    """Σ parts / D, where D is what `rule` makes of Σ totals; `[B, H, T, columns]`.

    Args:
        parts: each `[B, H, T, columns]`, or wider, with totals behind these columns.
        totals: as many, each `[B, H, T, n]`, of which the first column counts; none if parts
            have them.
    """
    division = Division(len(parts), columns, rule, eps)
    divide = by_kernel if kernels_serve(parts[0]) else by_formula
    return divide(division, *parts, *totals)


def by_formula(division: Division, *tensors: Tensor) -> Tensor:
    columns, tensor = division.columns, tensors[0]
    sums = _sum(tensors[: division.parts])
    totals = _sum(tensors[division.parts :]) if tensors[division.parts :] else sums[..., columns:]
    divisor = denominator(totals[..., :1], division.rule, division.eps)
    # A quotient's gradient makes three more tensors.
    return (sums[..., :columns] * divisor.reciprocal()).to(tensor.dtype)


def by_kernel(division: Division, *tensors: Tensor) -> Tensor:
    found: Tensor = _Quotient.apply(division, *tensors)[0]
    return found


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    dtype = compute_dtype(parts[0].dtype)
    return parts[0].to(dtype) if len(parts) == 1 else torch.stack(parts).sum(0, dtype=dtype)


class _Quotient(Function):
    """Tensors -> out, total; both are kept, nothing else is, and they carry on the graph."""

    @staticmethod
    def forward(ctx: Any, division: Division, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        from cosformer.ops.features.quotient_kernels import quotient_kernel

        tensors = tuple(x.contiguous() for x in tensors)
        above = tensors[: division.parts]
        below = tensors[division.parts :] or above
        out = above[0].new_empty(*above[0].shape[:3], division.columns)
        total = out.new_empty(out.shape[:3], dtype=torch.float32)
        ctx.division, ctx.widths = division, [x.shape[-1] for x in tensors]
        ctx.dtype = tensors[-1].dtype  # of totals
        blocks, options = _options(division, ctx.widths, total)
        with on_device_of(out):
            quotient_kernel[(blocks,)](
                above, below, out, total, total.numel(), division.eps, **options
            )
        ctx.save_for_backward(out, total)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        division, (out, total) = ctx.division, ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        if recorded() or grad_total is not None:
            above, below = _gradients(division, ctx.widths, out, total, grad, grad_total)
        else:
            above, below = _launch_gradients(division, ctx.widths, out, total, grad, ctx.dtype)
        below = below.to(ctx.dtype)
        return None, *[above] * division.parts, *[below] * (len(ctx.widths) - division.parts)


def _gradients(
    division: Division,
    widths: list[int],
    out: Tensor,
    total: Tensor,
    grad: Tensor,
    grad_total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Of a part, and of totals if they are apart; with a graph of their own."""
    _, columns, rule, eps = division
    total = total[..., None]
    grad = grad / denominator(total, rule, eps)
    by_total = -(grad * out).sum(-1, keepdim=True) * slope(total, rule, eps)
    if grad_total is not None:
        by_total = by_total + grad_total[..., None]
    if len(widths) > division.parts:
        return grad.to(out.dtype), F.pad(by_total, (0, widths[-1] - 1))
    joined = torch.cat([grad, F.pad(by_total, (0, widths[0] - columns - 1))], -1).to(out.dtype)
    return joined, joined


def _launch_gradients(
    division: Division,
    widths: list[int],
    out: Tensor,
    total: Tensor,
    grad: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The same by the kernel."""
    from cosformer.ops.features.quotient_kernels import quotient_gradient_kernel

    above = below = out.new_empty(*out.shape[:3], widths[0])
    if len(widths) > division.parts:
        below = out.new_empty(*out.shape[:3], widths[-1], dtype=dtype)
    blocks, options = _options(division, widths, total)
    behind = options["BELOW"] - options["AT"]
    with on_device_of(out):
        quotient_gradient_kernel[(blocks,)](
            grad.contiguous(), out, total, above, below, total.numel(), division.eps,
            BLOCK_B=padded(behind, 1), **options,
        )  # fmt: skip
    return above, below


def _options(division: Division, widths: list[int], total: Tensor) -> tuple[int, dict[str, Any]]:
    """How many blocks of rows, and what kernels are compiled for."""
    columns = padded(division.columns, 1)
    rows = max(1, TILE // columns)
    return -(-total.numel() // rows), {
        "V": division.columns,
        "ABOVE": widths[0],
        "BELOW": widths[-1],
        "AT": division.columns if len(widths) == division.parts else 0,
        "RULE": division.rule,
        "BLOCK_T": rows,
        "BLOCK_V": columns,
    }
