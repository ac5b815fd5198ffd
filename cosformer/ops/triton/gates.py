"""L of a decay per token, and the gradient of L: one kernel each in place of a dozen of torch's."""

import torch
from torch import Tensor

from cosformer.ops.triton.tiles import TILE
from cosformer.runtime import on_device_of


def sum_gates(gates: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Running sums of gates `[B, H, T]` in float64, and whether no gate of a row is above 0."""
    sums = gates.new_empty(gates.shape, dtype=torch.float64)
    fit = gates.new_empty(gates.shape[:2], dtype=torch.bool)
    _launch(gates, least, None, sums, fit)
    return sums, fit


def sum_gates_backward(gates: Tensor, least: float, grad: Tensor) -> Tensor:
    """The gradient of the gates, of that of their running sums."""
    found = gates.new_empty(gates.shape)
    _launch(gates, least, grad.contiguous(), found, None)
    return found


def balanced_decay_gradient(by_query: Tensor, by_key: Tensor, decay: Tensor) -> Tensor:
    """`decay_gradient(by_query, by_key, None, decay, zeros)`, of a stretch without a state."""
    from cosformer.ops.triton.kernels.gates import balance_kernel

    batch, heads, length = decay.shape
    found = decay.new_empty(decay.shape)
    with on_device_of(decay):
        balance_kernel[(batch * heads,)](
            by_query.contiguous(), by_key.contiguous(), found, length, BLOCK=TILE, num_warps=8
        )
    return found


def _launch(
    gates: Tensor, least: float, grad: Tensor | None, out: Tensor, fit: Tensor | None
) -> None:
    from cosformer.ops.triton.kernels.gates import gates_kernel

    batch, heads, length = gates.shape
    with on_device_of(gates):
        gates_kernel[(batch * heads,)](
            gates, grad, out, fit, length, heads, *gates.stride(),
            FLOOR=least, BACK=grad is not None, BLOCK=TILE, num_warps=8,
        )  # fmt: skip
