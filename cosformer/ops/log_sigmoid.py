"""Logarithms of gates, log sigmoid(x)/τ: by torch, or one kernel each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from cosformer.ops.features.formula import formula_gradients
from cosformer.runtime import compute_dtype, kernels_serve, on_device_of, recorded

BLOCK = 1024


def log_sigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """log sigmoid(x)/τ of `[B, H, T]`, in float32 at least."""
    return (by_kernel if kernels_serve(x) else by_formula)(x, temperature)


def by_formula(x: Tensor, temperature: float) -> Tensor:
    found = F.logsigmoid(x.to(compute_dtype(x.dtype)).contiguous())  # as its graphs take it to be
    return found if temperature == 1 else found / temperature


def by_kernel(x: Tensor, temperature: float) -> Tensor:
    found: Tensor = _LogSigmoid.apply(x, temperature)
    return found


class _LogSigmoid(Function):
    """Derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, temperature: float) -> Tensor:
        ctx.temperature = temperature
        ctx.save_for_backward(x)
        return _launch(x, None, torch.empty_like(x, dtype=torch.float32), temperature)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        if not recorded():
            return _launch(x, grad, torch.empty_like(x), ctx.temperature), None
        (found,) = formula_gradients(lambda y: by_formula(y, ctx.temperature), (x,), (True,), grad)
        return found, None


def _launch(x: Tensor, grad: Tensor | None, out: Tensor, temperature: float) -> Tensor:
    """`out`, filled; each tensor lies in memory as it likes."""
    from cosformer.ops.triton.kernels.gates import log_sigmoid_kernel

    batch, heads, length = x.shape
    blocks = -(-length // BLOCK)
    with on_device_of(x):
        log_sigmoid_kernel[(blocks * batch * heads,)](
            x, grad, out, blocks, length, heads, 1 / temperature,
            *x.stride(), *((0, 0, 0) if grad is None else grad.stride()), *out.stride(),
            BLOCK=BLOCK,
        )  # fmt: skip
    return out
