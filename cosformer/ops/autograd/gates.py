"""L of a decay per token: the running sum of its gates, by torch or by one kernel each way."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.check import require_all
from cosformer.ops.problem import GATE_RULE, Given, least_gate, running_sum
from cosformer.runtime import eager, kernels_know, kernels_serve, recorded


def summed_gates(gates: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_{s ≤ t} g_s of gates `[B, H, T]`, in float64, for rows of this dtype.

    A gate above 0, or NaN, on a GPU is an assertion on the device; elsewhere it was refused before.
    """
    least = least_gate(dtype)
    alone = gates.shape[-1] == gates.numel()  # a single row torch sums by a whole GPU
    if not alone and kernels_serve(gates):
        # skips functorch, which is not in use: 40 µs
        return cast(Tensor, super(Function, _RunningSum).apply(gates, least))
    if not alone and torch.compiler.is_compiling() and kernels_know(gates):
        return cast(Tensor, _RunningSum.apply(gates, least))
    if gates.is_cuda:
        require_all(gates <= 0, GATE_RULE, gates)
    return running_sum(gates, least)


def joint_gates(gates: Tensor, decay: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Gates `[B, H, T]` to which a decay per head is added; `decay` is its L."""
    if decay is None:
        return gates
    require_all(gates <= 0, GATE_RULE, gates)
    return gates.clamp(min=least_gate(dtype)) + decay[..., :1]


def with_sums(given: Given) -> Given:
    """The same problem with L in place of gates, by operations that torch differentiates."""
    if given.decay is None or not given.options.gated:
        return given
    sums = running_sum(given.decay, least_gate(given.q.dtype))
    return given._replace(decay=sums, options=given.options._replace(gated=False))


def gradient_of_gates(grad: Tensor, gates: Tensor, least: float) -> Tensor:
    """The gradient of gates, from that of their running sums: its sums from the end."""
    back = grad.flip(-1).cumsum(-1).flip(-1)
    return back.masked_fill(gates < least, 0).to(gates.dtype)


class _RunningSum(Function):
    """Linear but for the least gate, so that derivatives beyond the first are sums as well."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, least: float) -> Tensor:
        ctx.least = least
        ctx.save_for_backward(gates)
        return (_forward if eager(gates) else gates_forward)(gates, least)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gates,) = ctx.saved_tensors
        if recorded():
            return gradient_of_gates(grad, gates, ctx.least), None
        return (_backward if eager(grad) else gates_backward)(gates, ctx.least, grad), None


def _forward(gates: Tensor, least: float) -> Tensor:
    from cosformer.ops.triton import sum_gates

    sums, fit = sum_gates(gates, least)
    torch._assert_async(fit.all(), GATE_RULE)
    return sums


def _backward(gates: Tensor, least: float, grad: Tensor) -> Tensor:
    from cosformer.ops.triton import sum_gates_backward

    return sum_gates_backward(gates, least, grad)


# In a graph the kernels are operators of torch, as those of the sweeps are: inductor's own running
# sums in float64 are slow, and of long rows it makes none (PyTorch 2.11).
gates_forward = torch.library.custom_op(
    "cosformer::gates_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor gates, float least) -> Tensor",
)
gates_backward = torch.library.custom_op(
    "cosformer::gates_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor gates, float least, Tensor grad) -> Tensor",
)


@gates_forward.register_fake
def _(gates: Tensor, least: float) -> Tensor:
    return gates.new_empty(gates.shape, dtype=torch.float64)


@gates_backward.register_fake
def _(gates: Tensor, least: float, grad: Tensor) -> Tensor:
    return gates.new_empty(gates.shape)
