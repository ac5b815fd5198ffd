"""The least time that moving the bytes of a problem takes on a device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cosformer.bench.timing import median_times
from cosformer.ops import State

COPIED = 2**30
"""Bytes of the copy that bandwidth is measured by: far more than any cache holds."""
TIMES_MOVED = {"forward": 1, "forward_backward": 3}
"""How often q, k, v and the output go through memory: as values, then with their gradients."""
SHORTEST_STEP = 0.005
"""Milliseconds. A few launches take as long, however small the state."""


def copy_bandwidth(*, repeats: int, device: str) -> float:
    """Bytes per second, read and written, of a large copy within the device's memory."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source)}
    milliseconds = median_times(calls, repeats=repeats, device=device)["copy"]
    return 2 * COPIED / (milliseconds / 1e3)


def moved_bytes(inputs: Sequence[Tensor], pass_name: str) -> int:
    """Bytes a pass cannot avoid. `inputs`: q, k, v and one as large as the output."""
    return TIMES_MOVED[pass_name] * sum(x.nbytes for x in inputs)


def floor(count: int, bandwidth: float) -> float:
    """Milliseconds that so many bytes take."""
    return 1e3 * count / bandwidth


def step_floor(state: State, bandwidth: float) -> float:
    """Milliseconds of reading and writing a state once."""
    return max(SHORTEST_STEP, floor(2 * state_bytes(state), bandwidth))


def state_bytes(state: State) -> int:
    return sum(x.nbytes for x in state if isinstance(x, Tensor))
