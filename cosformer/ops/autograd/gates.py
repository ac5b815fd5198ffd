"""L of a decay per token, Σ_{s ≤ t} g_s: by torch, or one kernel each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.check import require_all
from cosformer.ops.triton.tiles import TILE
from cosformer.runtime import kernels_serve, on_device_of, recorded

RULE = "log_decay must be at most 0"


def floor_of(dtype: torch.dtype) -> float:
    """The least gate: its exponential is 0 already, and less would swallow the sums after it."""
    return -800.0 if dtype == torch.float64 else -110.0


def summed(gates: Tensor, floor: float) -> Tensor:
    """Σ_{s ≤ t} max(g_s, floor) over the last dimension, in float64; NaN stays NaN."""
    return gates.double().clamp(min=floor).cumsum(-1)


def running(gates: Tensor, floor: float) -> Tensor:
    """`summed` of gates `[B, H, T]`; refuses a gate above 0, or NaN."""
    alone = gates.shape[-1] == gates.numel()  # a single row torch sums by a whole GPU
    return (by_kernel if kernels_serve(gates) and not alone else by_formula)(gates, floor)


def by_formula(gates: Tensor, floor: float) -> Tensor:
    require_all(gates <= 0, RULE, gates)
    return summed(gates, floor)


def by_kernel(gates: Tensor, floor: float) -> Tensor:
    sums: Tensor = _Running.apply(gates, floor)
    return sums


class _Running(Function):
    """Linear but for the floor, so that derivatives beyond the first are sums as well."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, floor: float) -> Tensor:
        ctx.floor = floor
        ctx.save_for_backward(gates)
        sums = gates.new_empty(gates.shape, dtype=torch.float64)
        right = gates.new_empty(gates.shape[:2], dtype=torch.bool)
        _launch(gates, floor, None, sums, right)
        torch._assert_async(right.all(), RULE)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gates,) = ctx.saved_tensors
        if recorded():
            back = grad.flip(-1).cumsum(-1).flip(-1)
            return back.masked_fill(gates < ctx.floor, 0).to(gates.dtype), None
        found = gates.new_empty(gates.shape)
        _launch(gates, ctx.floor, grad.contiguous(), found, None)
        return found, None


def _launch(
    gates: Tensor, floor: float, grad: Tensor | None, out: Tensor, right: Tensor | None
) -> None:
    from cosformer.ops.triton.kernels.gates import gates_kernel

    batch, heads, length = gates.shape
    with on_device_of(gates):
        gates_kernel[(batch * heads,)](
            gates, grad, out, right, length, heads, *gates.stride(),
            FLOOR=floor, BACK=grad is not None, BLOCK=TILE, num_warps=8,
        )  # fmt: skip
