"""L of a decay per token: the running sum of its gates, by torch or by one kernel each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.check import require_all
from cosformer.ops.problem import GATE_RULE, least_gate, running_sum
from cosformer.runtime import kernels_serve, recorded


def summed_gates(gates: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_{s ≤ t} g_s of gates `[B, H, T]`, in float64, for rows of this dtype.

    A gate above 0, or NaN, on a GPU is an assertion on the device; elsewhere it was refused before.
    """
    least = least_gate(dtype)
    alone = gates.shape[-1] == gates.numel()  # a single row torch sums by a whole GPU
    if kernels_serve(gates) and not alone:
        # past functorch, which is not there: 40 µs
        sums: Tensor = super(Function, _RunningSum).apply(gates, least)
        return sums
    if gates.is_cuda:
        require_all(gates <= 0, GATE_RULE, gates)
    return running_sum(gates, least)


class _RunningSum(Function):
    """Linear but for the least gate, so that derivatives beyond the first are sums as well."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, least: float) -> Tensor:
        from cosformer.ops.triton import sum_gates

        ctx.least = least
        ctx.save_for_backward(gates)
        sums, fit = sum_gates(gates, least)
        torch._assert_async(fit.all(), GATE_RULE)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gates,) = ctx.saved_tensors
        if recorded():
            back = grad.flip(-1).cumsum(-1).flip(-1)
            return back.masked_fill(gates < ctx.least, 0).to(gates.dtype), None
        from cosformer.ops.triton import sum_gates_backward

        return sum_gates_backward(gates, ctx.least, grad), None
