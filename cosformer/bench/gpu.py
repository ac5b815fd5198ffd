"""Rows that only a GPU gives: time without the host, distance from the floor, errors of peers."""

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosformer.bench.candidates import CANDIDATES, PASSES, Candidate
from cosformer.bench.cells import Case, Cell, Setup
from cosformer.bench.checks import LENGTHS, against_formula
from cosformer.bench.floor import copy_bandwidth, floor, moved_bytes, state_bytes, state_traffic
from cosformer.bench.inputs import Inputs
from cosformer.bench.timing import Call, K, attempt, host_time, median_times, recorded
from cosformer.ops import State, multiscale_decays, step
from cosformer.records import Row, Run

STEPS = tuple(Cell(batch, 16, 1, 64) for batch in (1, 8, 64, 512))
STEP_HORIZON = 2**30
"""The horizon of measured steps: more than the replays of a step take."""
STEPPED, MOST_STATES = 2**28, 64
"""A sample steps through states of so many bytes, at most so many states: as the layers of a model
do, and too many for a GPU's cache. In one graph, because to start a graph takes as long as a short
step."""


def failed(this: Run, name: str, reason: str, at: Mapping[str, Any]) -> Row:
    """The row that stands for a missing number: the candidate, and why it could not be measured."""
    return this.row("failed", 1, "", candidate=name, reason=reason, **at)


def split_failures(
    calls: Mapping[str, Call], device: str
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that work, each made once, and the reasons of those that do not."""
    reasons = {name: attempt(call, device)[1] for name, call in calls.items()}
    working = {name: call for name, call in calls.items() if not reasons[name]}
    return working, {name: reason for name, reason in reasons.items() if reason}


def measure_bandwidth(this: Run, setup: Setup) -> Row:
    """Bytes per second of a copy, the yardstick of every floor."""
    found = copy_bandwidth(repeats=setup.repeats, device=setup.device)
    return this.row("copy_bandwidth", found, "bytes/s", candidate="copy", repeats=setup.repeats)


def measure_errors(this: Run, setup: Setup, names: Sequence[str], *, causal: bool) -> Iterator[Row]:
    """How far every cosFormer, peers included, is from the formula in float64."""
    for name in names:
        candidate = CANDIDATES[name]
        if candidate.formula is None or (candidate.causal_only and not causal):
            continue
        length = max(LENGTHS[setup.device])
        at = {"causal": causal, "dtype": setup.dtype_name, "length": length}
        look = functools.partial(
            against_formula,
            candidate,
            causal=causal,
            dtype=setup.dtype,
            device=setup.device,
            seed=setup.seed,
            length=length,
        )
        checks, reason = attempt(look, setup.device)
        if checks is None:
            yield failed(this, name, reason, at)
            continue
        for check in checks:
            about = at | {"quantity": check.name, "allowed": check.allowed}
            if math.isfinite(check.error):
                yield this.row("error", check.error, "x largest", candidate=name, **about)
            else:
                yield failed(this, name, f"error is {check.error}", about)


def measure_graphs(
    this: Run, case: Case, pass_name: str, calls: Mapping[str, Call], bandwidth: float
) -> Iterator[Row]:
    """Time without the host, against the time that moving the bytes takes."""
    at = case.config(pass_name)
    least = floor(moved_bytes(case.inputs, pass_name), bandwidth)
    yield this.row("floor", least, "ms", candidate="copy", **at)
    for name, milliseconds in graph_times(calls, case.setup).items():
        about = {"candidate": name, **at}
        count = moved_bytes(case.inputs, pass_name, CANDIDATES[name])
        least = floor(count, bandwidth)
        yield this.row("time_graph", milliseconds, "ms", **about)
        yield this.row("floor_ratio", milliseconds / least, "x", **about)
        yield this.row("bandwidth", count / (milliseconds / 1e3), "bytes/s", **about)


def measure_host(this: Run, case: Case, pass_name: str, calls: Mapping[str, Call]) -> Iterator[Row]:
    """How long the host is busy with one call, and with additions: what autograd itself takes.

    It hands a backward pass to a thread of its own, unless that is switched off.
    """
    q = case.inputs.q
    alike = case.inputs._replace(k=q, v=q)  # keys may have fewer heads
    calls = {**calls, "additions": PASSES[pass_name](ADDITIONS, alike)}
    for own_thread in (True, False) if pass_name == "forward_backward" else (True,):
        at = case.config(pass_name) | ({} if own_thread else {"backward": "in the caller's thread"})
        with torch.autograd.set_multithreading_enabled(own_thread):
            for name, call in calls.items():
                spent = host_time(call, device=case.setup.device)
                yield this.row("host_time", spent, "ms", candidate=name, **at)


def _add(inputs: Inputs) -> Tensor:
    return inputs.q + inputs.k + inputs.v


ADDITIONS = Candidate(_add)


@torch.no_grad()
def measure_steps(this: Run, setup: Setup, bandwidth: float) -> Iterator[Row]:
    """One decoding step of many streams, without and with a decay per head.

    Its time is compared with that of reading and writing the states once.
    """
    for cell in STEPS:
        q, k, v = setup.draw(cell, count=3)
        at = setup.config(cell, causal=True) | {"pass": "step", "length": cell.length}
        decays = {"step": None, "step_decay": multiscale_decays(cell.heads)}
        sizes = (cell.batch, cell.heads, cell.width, cell.width)
        make = functools.partial(State.empty, *sizes, horizon=STEP_HORIZON, device=setup.device)
        one = make()
        count = min(MOST_STATES, -(-STEPPED // state_bytes(one)))
        states = {name: [make(decay=decay) for _ in range(count)] for name, decay in decays.items()}

        calls = {name: functools.partial(_steps, q, k, v, mine) for name, mine in states.items()}
        for name, milliseconds in graph_times(calls, setup).items():
            about = {"candidate": name, "states": count, **at}
            taken, traffic = milliseconds / count, state_traffic(one, bandwidth)
            yield this.row("step_time_graph", taken, "ms", **about)
            yield this.row("step_traffic_ratio", taken / traffic, "x", **about)


def _steps(q: Tensor, k: Tensor, v: Tensor, states: Sequence[State]) -> None:
    for state in states:
        step(q, k, v, state)


def graph_times(calls: Mapping[K, Call], setup: Setup) -> dict[K, float]:
    """Milliseconds of those calls that can be recorded as CUDA graphs."""
    graphs: dict[K, Call] = {}
    for name, call in calls.items():
        graph, reason = attempt(functools.partial(recorded, call), setup.device)
        if graph is None:
            print(f"{name} cannot be recorded as a CUDA graph: {reason}", file=sys.stderr)
        else:
            graphs[name] = graph
    return median_times(graphs, repeats=setup.repeats, device=setup.device) if graphs else {}
