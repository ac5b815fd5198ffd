"""Sequences on the device, or beside it where they do not fit; batches are gathered from them."""

import numpy as np
import torch
from torch import Tensor

from cosformer.tasks.ragged import Array, Ragged

SHARE = 0.25
"""Share of the device's free memory that data may take; models need the rest."""
MULTIPLE = 64
"""Widths of batches are multiples of this, so that few shapes occur."""


def to_device(array: Array, device: torch.device) -> Tensor:
    """The array as a tensor, on the device if it fits there."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return tensor.to(device) if tensor.nbytes <= SHARE * free else tensor.pin_memory()
    return tensor.to(device)


class Resident:
    """`Ragged` sequences from which batches are made without a loop in Python."""

    def __init__(self, data: Ragged, *, pad: int, length: int, device: torch.device) -> None:
        self.flat = to_device(data.flat, device)
        self.starts = torch.from_numpy(data.starts[:-1].astype(np.int64))
        self.lengths = torch.from_numpy(np.minimum(data.lengths, length).astype(np.int64))
        self.labels = torch.from_numpy(data.labels.astype(np.int64))
        self.pad, self.length, self.device = pad, length, device

    def gather(self, indices: Array) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] and mask [B, T] of these sequences, cut to `length`, padded at the end."""
        numbers = torch.from_numpy(indices.astype(np.int64))
        lengths = self.lengths[numbers]
        longest = int(lengths.max()) if len(numbers) else 0
        width = min(self.length, -(-max(longest, 1) // MULTIPLE) * MULTIPLE)
        at = self.flat.device
        lengths, starts = lengths.to(at)[:, None], self.starts[numbers].to(at)[:, None]
        positions = torch.arange(width, device=at)
        mask = positions < lengths
        found = self.flat[torch.where(mask, starts + positions, 0)].long()
        tokens = torch.where(mask, found, self.pad)
        return tokens.to(self.device), mask.to(self.device)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of all sequences, where each begins, and its label."""
        return self.flat, self.starts, self.labels

    def labels_of(self, indices: Array) -> Tensor:
        return self.labels[torch.from_numpy(indices.astype(np.int64))].to(self.device)
