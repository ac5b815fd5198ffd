"""Rows that only a GPU gives: time without the host, distance from the floor, errors of peers."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cosformer.bench.candidates import CANDIDATES, draw
from cosformer.bench.cells import Case, Cell, setting
from cosformer.bench.checks import against_formula
from cosformer.bench.floor import copy_bandwidth, floor, moved_bytes, step_floor
from cosformer.bench.timing import Call, attempt, host_time, median_times, recorded
from cosformer.ops import State, step
from cosformer.records import Row, Run

CELLS = (
    Cell(8, 16, 1024, 64),
    Cell(8, 16, 2048, 64),
    Cell(8, 16, 4096, 64),
    Cell(2, 16, 16384, 64),
    Cell(1, 16, 65536, 64),
    Cell(2, 8, 16384, 128),
    Cell(1, 16, 1048576, 64),
)
STEPS = tuple(Cell(batch, 16, 1, 64) for batch in (1, 8, 64, 512))
STEP_HORIZON = 2**30
"""Room for every replay of a step."""


def failed(this: Run, name: str, reason: str, at: Mapping[str, Any]) -> Row:
    """Instead of a number: who could not be measured, and why."""
    return this.row("failed", 1, "", candidate=name, reason=reason, **at)


def split_failures(
    calls: Mapping[str, Call], device: str
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that work, each made once, and the reasons of the others."""
    reasons = {name: attempt(call, device)[1] for name, call in calls.items()}
    working = {name: call for name, call in calls.items() if not reasons[name]}
    return working, {name: reason for name, reason in reasons.items() if reason}


def measure_errors(
    this: Run, names: Sequence[str], *, causal: bool, dtype: torch.dtype, device: str, seed: int
) -> Iterator[Row]:
    """How far every cosFormer, peers included, is from the formula in float64."""
    at = {"causal": causal, "dtype": str(dtype).removeprefix("torch.")}
    for name in (n for n in names if CANDIDATES[n].is_cosformer):
        if CANDIDATES[name].causal_only and not causal:
            continue
        look = functools.partial(
            against_formula,
            CANDIDATES[name].attend,
            causal=causal,
            dtype=dtype,
            device=device,
            seed=seed,
        )
        checks, reason = attempt(look, device)
        if checks is None:
            yield failed(this, name, reason, at)
            continue
        for check in checks:
            about = {"candidate": name, "quantity": check.name, "allowed": check.allowed, **at}
            if check.error == check.error:  # a row holds no NaN
                yield this.row("error", check.error, "x largest", **about)
            else:
                yield failed(this, name, "NaN", at | {"quantity": check.name})


def measure_bandwidth(this: Run, *, repeats: int, device: str) -> Row:
    """Bytes per second of a copy, the yardstick of every floor."""
    return this.row(
        "copy_bandwidth", copy_bandwidth(repeats=repeats, device=device), "bytes/s", repeats=repeats
    )


def measure_graphs(
    this: Run, case: Case, pass_name: str, calls: Mapping[str, Call], bandwidth: float
) -> Iterator[Row]:
    """Time without the host, against the time that moving the bytes takes."""
    at = case.setting(pass_name)
    count = moved_bytes(case.inputs, pass_name)
    least = floor(count, bandwidth)
    yield this.row("floor", least, "ms", candidate="copy", **at)
    graphs = _recordings(calls, case.device)
    times = median_times(graphs, repeats=case.repeats, device=case.device) if graphs else {}
    for name, milliseconds in times.items():
        about = {"candidate": name, **at}
        yield this.row("time_graph", milliseconds, "ms", **about)
        yield this.row("floor_ratio", milliseconds / least, "x", **about)
        yield this.row("bandwidth", count / (milliseconds / 1e3), "bytes/s", **about)


def measure_host(
    this: Run, case: Case, pass_name: str, calls: Mapping[str, Call]
) -> Iterator[Row]:
    """How long the host is busy with one call."""
    for name, call in calls.items():
        spent = host_time(call, device=case.device)
        yield this.row("host_time", spent, "ms", candidate=name, **case.setting(pass_name))


@torch.no_grad()
def measure_steps(
    this: Run, cells: Sequence[Cell], bandwidth: float, *, dtype: torch.dtype, repeats: int,
    device: str, seed: int,
) -> Iterator[Row]:
    """One decoding step of many streams as a CUDA graph."""
    for cell in cells:
        q, k, v = draw(cell, 3, dtype=dtype, device=device, seed=seed)
        sizes = (cell.batch, cell.heads, cell.width, cell.width)
        state = State.empty(*sizes, horizon=STEP_HORIZON, device=device)
        at = setting(cell, True, str(dtype).removeprefix("torch."), repeats)
        calls = {"step": functools.partial(step, q, k, v, state)}
        least = step_floor(state, bandwidth)
        yield this.row("step_floor", least, "ms", candidate="copy", **at)
        graphs = _recordings(calls, device)
        times = median_times(graphs, repeats=repeats, device=device) if graphs else {}
        for name, milliseconds in times.items():
            yield this.row("step_time_graph", milliseconds, "ms", candidate=name, **at)
            yield this.row("step_floor_ratio", milliseconds / least, "x", candidate=name, **at)


def _recordings(calls: Mapping[str, Call], device: str) -> dict[str, Call]:
    """Those of the calls that can be recorded as CUDA graphs."""
    graphs = {}
    for name, call in calls.items():
        make: Callable[[], Call] = functools.partial(recorded, call)
        graph, reason = attempt(make, device)
        if graph is None:
            print(f"{name} cannot be recorded as a CUDA graph: {reason}", file=sys.stderr)
        else:
            graphs[name] = graph
    return graphs
