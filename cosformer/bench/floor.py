"""The least time that moving the bytes of a problem takes on a device."""

import torch
from torch import Tensor

from cosformer.bench.candidates import Candidate
from cosformer.bench.inputs import Inputs
from cosformer.bench.timing import median_times
from cosformer.ops import State

COPIED = 2**30
"""Bytes of the copy that bandwidth is measured by: far more than any cache holds."""
TIMES_MOVED = {"forward": 1, "forward_backward": 3}
"""How often q, k, v, gates and output go through memory: as values, then with their gradients."""


def copy_bandwidth(*, repeats: int, device: str) -> float:
    """Bytes per second, read and written, of a large copy within the device's memory."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source)}
    milliseconds = median_times(calls, repeats=repeats, device=device)["copy"]
    return 2 * COPIED / (milliseconds / 1e3)


def moved_bytes(inputs: Inputs, pass_name: str, candidate: Candidate | None = None) -> int:
    """Bytes that a pass must move: q, k, v, the output, and gates if the candidate has them."""
    moved = [inputs.q, inputs.k, inputs.v, inputs.gradient]  # the output is as large as the last
    if candidate is not None and candidate.has_gates:
        moved.append(inputs.gates)
    return TIMES_MOVED[pass_name] * sum(x.nbytes for x in moved)


def floor(count: int, bandwidth: float) -> float:
    """Milliseconds that so many bytes take."""
    return 1e3 * count / bandwidth


def state_traffic(state: State, bandwidth: float) -> float:
    """Milliseconds of reading and writing a state once."""
    return floor(2 * state_bytes(state), bandwidth)


def state_bytes(state: State) -> int:
    return sum(x.nbytes for x in state if isinstance(x, Tensor))
