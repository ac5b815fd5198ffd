"""Rows of one decoding step: its time and memory must not depend on the position."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cosformer.bench.cells import Cell, Setup
from cosformer.bench.floor import state_bytes
from cosformer.bench.timing import median_times, peak_extra_bytes
from cosformer.ops import State, attention_with_state, step
from cosformer.records import Row, Run

BLOCK = 2**14
"""Tokens read at once on the way to a position."""


@torch.no_grad()
def measure_positions(
    this: Run, setup: Setup, cell: Cell, positions: Sequence[int], config: Mapping[str, Any]
) -> Iterator[Row]:
    """One decoding step at each position, the states reached by reading tokens."""
    q, k, v = setup.draw(cell, count=3)
    states = {position: state_at(position, setup, cell) for position in positions}
    calls = {
        position: functools.partial(step, q, k, v, state) for position, state in states.items()
    }
    times = median_times(calls, repeats=setup.repeats, device=setup.device)
    held = {}
    for position, state in states.items():
        at = {**config, "position": position}
        held[position] = state_bytes(state) + peak_extra_bytes(calls[position], setup.device)
        yield this.row("step_time", times[position], "ms", **at)
        yield this.row("step_memory", held[position], "bytes", **at)
    first, last = min(held), max(held)
    if first < last:
        at = {**config, "from": first, "to": last}
        yield this.row("step_memory_growth", held[last] - held[first], "bytes", **at)


@torch.no_grad()
def state_at(position: int, setup: Setup, cell: Cell) -> State:
    """The state of a stream that has read so many tokens."""
    sizes = (cell.batch, cell.heads, cell.width, cell.width)
    horizon = position + 2**20  # room for the timed steps
    state = State.empty(*sizes, horizon=horizon, device=setup.device)
    block = setup.draw(cell._replace(length=min(position, BLOCK)), count=3)
    for start in range(0, position, BLOCK):
        part = (x[:, :, : position - start] for x in block)
        _, state = attention_with_state(*part, state=state)
    return state
