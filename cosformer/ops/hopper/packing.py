"""Where the tokens of packed sequences stand, by one kernel in place of twenty of torch's."""

import functools
import struct

import torch
from torch import Tensor

from cosformer.ops.hopper.nvrtc import Launch
from cosformer.ops.hopper.plan import kernel
from cosformer.ops.hopper.roles import Packing
from cosformer.ops.problem import Packed


def place_packed(cu_seqlens: Tensor, length: int, theta: Tensor | None, states: int) -> Packed:
    """What follows from checked `cu_seqlens`.

    Args:
        theta: `[h, 1]`; None for π/2 over the length of each sequence.
        states: 2 for a cosine, 1 for none.
    """
    bounds = cu_seqlens.contiguous()
    angles = None if theta is None else theta.contiguous()
    heads, sequences = 1 if theta is None else theta.shape[0], bounds.shape[0] - 1

    def made(*shape: int, dtype: torch.dtype) -> Tensor:
        return bounds.new_empty(shape, dtype=dtype)

    position = made(1, length, dtype=torch.float64)
    own = made(1, length, dtype=torch.float64) if angles is None else angles
    found = Packed(
        position,
        own,
        made(length, dtype=torch.int64),
        made(sequences + 1, dtype=torch.int32),
        made(1, heads, length, states, dtype=torch.float32),
    )
    options = Packing(bounds.dtype == torch.int64, angles is None, states)
    launch = _launch(options, length, sequences, heads, bounds.device.index)
    launch(bounds, angles, position, own, found.sequence, found.bounds, found.basis)
    return found


@functools.lru_cache(256)
def _launch(options: Packing, length: int, sequences: int, heads: int, device: int) -> Launch:
    tail = struct.pack("3i", length, sequences, heads)
    offsets = (*range(0, 7 * 8, 8), 56, 60, 64)
    grid = (-(-length // 256), 1)
    return Launch(kernel("place_packed", options, device), grid, 256, device, 7, tail, offsets)
