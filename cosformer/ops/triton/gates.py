"""L of a decay per token, and the gradient of L, by kernels in place of a dozen of torch's."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cosformer.ops.triton.tiles import TILE
from cosformer.runtime import on_device_of


def sum_gates(gates: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Running sums of gates `[B, H, T]` in float64, and whether no gate of a block is above 0."""
    sums = gates.new_empty(gates.shape, dtype=torch.float64)
    fit = gates.new_empty(*gates.shape[:2], _blocks(gates), dtype=torch.bool)
    _launch(gates, least, None, sums, fit)
    return sums, fit


def sum_gates_backward(gates: Tensor, least: float, grad: Tensor) -> Tensor:
    """The gradient of the gates, from the gradient of their running sums."""
    found = gates.new_empty(gates.shape)
    _launch(gates, least, grad.contiguous(), found, None)
    return found


def balanced_decay_gradient(by_query: Tensor, by_key: Tensor, decay: Tensor) -> Tensor:
    """`decay_gradient(by_query, by_key, None, decay, zeros)`, of a stretch without a state."""
    from cosformer.ops.triton.kernels.gates import balance_kernel

    batch, heads, length = decay.shape
    rows, blocks = batch * heads, _blocks(decay)
    found, parts = decay.new_empty(decay.shape), _room_for_parts(decay, 2)
    by_query, by_key = by_query.contiguous(), by_key.contiguous()
    with on_device_of(decay):
        for part in _passes(blocks):
            balance_kernel[(rows * blocks,)](
                by_query, by_key, found, parts, length, blocks, rows,
                PASS=part, BLOCK=TILE, num_warps=8,
            )  # fmt: skip
    return found


def _launch(
    gates: Tensor, least: float, grad: Tensor | None, out: Tensor, fit: Tensor | None
) -> None:
    from cosformer.ops.triton.kernels.gates import gates_kernel

    batch, heads, length = gates.shape
    blocks, parts = _blocks(gates), _room_for_parts(gates, 1)
    with on_device_of(gates):
        for part in _passes(blocks):
            gates_kernel[(batch * heads * blocks,)](
                gates, grad, out, fit, parts, length, heads, blocks, *gates.stride(),
                FLOOR=least, BACK=grad is not None, PASS=part, BLOCK=TILE, num_warps=8,
            )  # fmt: skip


def _blocks(rows: Tensor) -> int:
    """Into how many blocks of tokens a row `[B, H, T]` is cut."""
    return -(-rows.shape[2] // TILE)


def _passes(blocks: int) -> Iterator[int]:
    """The launches that rows of so many blocks take."""
    from cosformer.ops.triton.kernels.gates import ALONE, JOINED, PARTS

    passes = (ALONE,) if blocks == 1 else (PARTS, JOINED)
    return (each.value for each in passes)


def _room_for_parts(rows: Tensor, count: int) -> Tensor | None:
    """Memory for so many sums of every block; None where a row is one block."""
    batch, heads, _ = rows.shape
    if _blocks(rows) == 1:
        return None
    return rows.new_empty(count, batch, heads, _blocks(rows), dtype=torch.float64)
