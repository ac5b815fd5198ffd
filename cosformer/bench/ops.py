"""`cosformer bench ops`: the op against softmax attention in one run, every number a row."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cosformer import records
from cosformer.bench import gpu
from cosformer.bench.candidates import CANDIDATES, PASSES
from cosformer.bench.cells import CELLS, Case, Cell, Setup
from cosformer.bench.checks import LENGTHS, Check, against_formula, stream_against_full_pass
from cosformer.bench.first_call import measure_first_calls
from cosformer.bench.steps import measure_positions
from cosformer.bench.timing import Call, median_times, peak_extra_bytes, threads
from cosformer.bench.verb import OnDevice, check_among, check_options

GROWTH_FROM = 4096
"""Below this length fixed costs hide how time grows."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": tuple(2**n for n in range(8, 17)),
        "quadratic_up_to": 16384,
        "candidates": ("chunked", "decay", "gates", "sdpa"),
        "dtype": "float32",
        "parts": ("cells", "growth", "positions"),
    },
    "cuda": {
        "cells": tuple(CELLS),
        "quadratic_up_to": 65536,
        "candidates": (
            "auto",
            "decay",
            "gates",
            "chunked",
            "sdpa_flash",
            "sdpa_cudnn",
            "fla_cos",
            "fla_linear",
            "fla_fused",
            "fla_retention",
            "fla_simple_gla",
            "fla_gla",
        ),
        "dtype": "bfloat16",
        "parts": ("errors", "steps", "first_calls", "cells", "growth", "positions"),
    },
}
"""Device -> what is measured there where the options do not say; `parts` are all that it has."""


@dataclass(frozen=True)
class Options(OnDevice):
    """Time and memory of the op against PyTorch's softmax attention, in one run."""

    name = "ops"
    defaults = DEFAULTS

    lengths: tuple[int, ...] | None = None
    """Sequence lengths; on cpu, 256 to 65,536 if not given."""
    shapes: tuple[tuple[int, int, int, int], ...] | None = None
    """Batch, heads, length and width, instead of lengths."""
    cells: tuple[str, ...] | None = None
    """Names of cells, as 8x16x4096x64 or 8x16x4096x64-grouped; on cuda, all if not given."""
    quadratic_up_to: int | None = None
    """Longest sequence given to candidates of quadratic cost; 16,384 on cpu, 65,536 on cuda."""
    candidates: tuple[str, ...] | None = None
    """Who is measured, ratios relative to the first. On cuda all peers if not given."""
    parts: tuple[str, ...] | None = None
    """Which rows are measured: cells, growth, positions; on cuda also errors, steps, first_calls.
    All of them if not given."""
    batch: int = 1
    """Sequences per call, unless shapes say it."""
    heads: int = 8
    """Attention heads, unless shapes say it."""
    width: int = 64
    """Width of queries, keys and values of one head, unless shapes say it."""
    causal: bool = True
    """Each token sees the past only; --no-causal for full attention. On cuda both, or full only."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """Type of q, k and v; float32 on cpu, bfloat16 on cuda."""
    repeats: int = 9
    """Samples behind each median."""
    positions: tuple[int, ...] = (10, 1_000_000)
    """Positions at which one decoding step is measured."""
    seed: int = 0
    """Seed of the inputs."""

    def __post_init__(self) -> None:
        check_options(self, "batch", "heads", "width", "lengths")
        given = [name for name in ("lengths", "shapes", "cells") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"lengths, shapes and cells exclude each other, got {given}")
        if self.shapes is not None:
            _require_shapes(self.shapes)
        if self.cells is not None:
            check_among("cells", self.cells, CELLS)
        if self.parts is not None:
            check_among("parts", self.parts, DEFAULTS[self.device]["parts"])
        if min(self.positions, default=0) < 0:
            raise ValueError(f"positions must not be negative, got {self.positions}")
        able = [name for name, each in CANDIDATES.items() if self.device in each.devices]
        check_among("candidates", self.names, able)

    @property
    def names(self) -> tuple[str, ...]:
        """Candidates, whether they are installed or not."""
        return tuple(self.given("candidates"))

    @property
    def measured(self) -> list[Cell]:
        """The cells measured, in this order."""
        if self.shapes is not None:
            return [Cell(*shape) for shape in self.shapes]
        names = None if self.lengths else self.given("cells")
        if names is not None:
            return [CELLS[name] for name in names]
        lengths = sorted(self.given("lengths"))
        return [Cell(self.batch, self.heads, length, self.width) for length in lengths]

    @property
    def causalities(self) -> tuple[bool, ...]:
        return (True, False) if self.device == "cuda" and self.causal else (self.causal,)

    @property
    def setup(self) -> Setup:
        dtype = getattr(torch, self.given("dtype"))
        return Setup(self.device, dtype, self.repeats, self.seed)

    def taking_part(self, cell: Cell, *, causal: bool) -> list[str]:
        """Candidates that are installed and can compute this cell."""
        is_short = cell.length <= self.given("quadratic_up_to")
        able = {
            name: candidate.is_present
            and (is_short or not candidate.is_quadratic)
            and (causal or not candidate.causal_only)
            and (cell.packing is None or candidate.packs)
            for name, candidate in CANDIDATES.items()
        }
        return [name for name in self.names if able[name]]

    def wants(self, part: str) -> bool:
        """Whether these rows are measured."""
        return part in self.given("parts")


def run(options: Options) -> int:
    """Check, then measure; 1 if a check fails."""
    records.require_rows(options.path, "out")  # before the checks, which take seconds
    with threads(options.threads):
        checks = check(options)
    for failed in (c for c in checks if not c.passed):
        print(f"check failed, nothing is timed: {failed}", file=sys.stderr)
    if not all(c.passed for c in checks):
        return 1
    print(f"{len(checks)} checks against the float64 formula passed")
    keys = ["candidate", "pass", "length", "position"]
    keys += (
        ["batch", "key_heads", "packing", "causal", "quantity", "backward", "cache", "reason"]
        if options.device == "cuda"
        else []
    )
    return options.keep(measure(options), keys)


def check(options: Options) -> list[Check]:
    """Every cosFormer of ours against the formula in float64, and steps against the full pass."""
    found = [stream_against_full_pass(device=options.device, seed=options.seed)]
    ours = [n for n in options.names if CANDIDATES[n].formula and not CANDIDATES[n].package]
    lengths = LENGTHS[options.device]
    for name, causal, length in itertools.product(ours, options.causalities, lengths):
        found += against_formula(
            CANDIDATES[name],
            causal=causal,
            dtype=options.setup.dtype,
            device=options.device,
            seed=options.seed,
            length=length,
        )
    return found


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run, each as soon as it is known."""
    this = records.Run.begin(device=options.device, seed=options.seed)
    bandwidth = None
    if options.device == "cuda":
        yardstick = gpu.measure_bandwidth(this, options.setup)
        bandwidth = yardstick.value
        yield yardstick
        yield from _measure_once_on_gpu(options, this, bandwidth)
    for cell in options.measured if options.wants("cells") else ():
        inputs = options.setup.inputs(cell)
        for causal in options.causalities:
            names = options.taking_part(cell, causal=causal)
            case = Case(options.setup, cell, inputs._replace(causal=causal), names)
            yield from _measure_case(options, this, case, bandwidth)
    if options.wants("growth"):
        yield from _measure_growth(options, this)
    if options.wants("errors"):  # peers last: some tune themselves for minutes at a new length
        yield from _measure_errors(options, this, peers=True)
    if options.positions and options.wants("positions"):
        one = Cell(options.batch, options.heads, 1, options.width)
        at = options.setup.config(one, causal=options.causal)
        yield from measure_positions(this, options.setup, one, options.positions, at)


def _measure_case(
    options: Options, this: records.Run, case: Case, bandwidth: float | None
) -> Iterator[records.Row]:
    """All rows of a cell. On a GPU, where `bandwidth` is known, there are more of them."""
    for pass_name in PASSES:
        calls: dict[str, Call] = case.calls(pass_name)
        if bandwidth is not None:
            calls, reasons = gpu.split_failures(calls, options.device)
            for name, reason in reasons.items():
                yield gpu.failed(this, name, reason, case.config(pass_name))
        if not calls:
            continue
        yield from _measure_times(this, case, pass_name, calls, first=options.names[0])
        if bandwidth is not None:
            yield from gpu.measure_graphs(this, case, pass_name, calls, bandwidth)
            if case.cell == min(options.measured, key=lambda cell: cell.batch * cell.length):
                yield from gpu.measure_host(this, case, pass_name, calls)
        if bandwidth is not None or pass_name == "forward_backward":
            yield from _measure_memory(this, case, pass_name, calls)


def _measure_once_on_gpu(
    options: Options, this: records.Run, bandwidth: float
) -> Iterator[records.Row]:
    """The rows that do not depend on the cells."""
    missing = [name for name in options.names if not CANDIDATES[name].is_present]
    for name in missing:
        reason = f"package {CANDIDATES[name].package} is not installed"
        yield gpu.failed(this, name, reason, {"dtype": options.setup.dtype_name})
    if options.wants("errors"):
        yield from _measure_errors(options, this, peers=False)
    if options.wants("steps"):
        yield from gpu.measure_steps(this, options.setup, bandwidth)
    if options.wants("first_calls"):
        yield from measure_first_calls(this, options.setup)


def _measure_errors(options: Options, this: records.Run, *, peers: bool) -> Iterator[records.Row]:
    """Rows of our own candidates, or of those from packages that are installed."""
    names = [name for name in options.names if CANDIDATES[name].is_present]
    names = [name for name in names if (CANDIDATES[name].package is not None) == peers]
    for causal in options.causalities:
        yield from gpu.measure_errors(this, options.setup, names, causal=causal)


def _measure_times(
    this: records.Run, case: Case, pass_name: str, calls: dict[str, Call], *, first: str
) -> Iterator[records.Row]:
    """Time of every candidate, and its ratio to the time of the first."""
    times = median_times(calls, repeats=case.setup.repeats, device=case.setup.device)
    at = case.config(pass_name)
    for name, milliseconds in times.items():
        yield this.row("time", milliseconds, "ms", candidate=name, **at)
    for name in [n for n in times if n != first and first in times]:
        ratio = times[name] / times[first]
        yield this.row("time_ratio", ratio, "x", candidate=name, relative_to=first, **at)


def _measure_memory(
    this: records.Run, case: Case, pass_name: str, calls: dict[str, Call]
) -> Iterator[records.Row]:
    """Peak memory of a pass beyond its inputs; outputs and gradients count."""
    size = sum(x.nbytes for x in (case.inputs.q, case.inputs.k, case.inputs.v))
    for name, call in calls.items():
        extra = peak_extra_bytes(call, case.setup.device)
        at = case.config(pass_name)
        yield this.row("peak_memory", extra / size, "x (q+k+v)", candidate=name, **at)


def _measure_growth(options: Options, this: records.Run) -> Iterator[records.Row]:
    """How the first candidate's time grows with the length, where nothing else differs.

    The lengths take turns, or a machine that changes its pace would bend the curve.
    """
    first = options.names[0]
    long = [cell for cell in options.measured if cell.length >= GROWTH_FROM and not cell.packing]
    for alike in dict.fromkeys(cell._replace(length=0) for cell in long):
        cells = [cell for cell in long if cell._replace(length=0) == alike]
        taking = [c for c in cells if first in options.taking_part(c, causal=options.causal)]
        if len(taking) < 2:
            continue
        inputs = {cell: options.setup.inputs(cell) for cell in taking}
        for causal, pass_name in itertools.product(options.causalities, PASSES):
            cases = {
                cell.length: Case(options.setup, cell, given._replace(causal=causal), [first])
                for cell, given in inputs.items()
            }
            calls = {length: case.calls(pass_name)[first] for length, case in cases.items()}
            by_length = median_times(calls, repeats=options.repeats, device=options.device)
            at = cases[min(cases)].config(pass_name)
            del at["length"]
            at |= {"candidate": first, "from": min(by_length), "to": max(by_length)}
            yield this.row("growth_exponent", records.growth_exponent(by_length), "", **at)


def _require_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    if not shapes or any(len(shape) != 4 or min(shape) < 1 for shape in shapes):
        raise ValueError(
            f"shapes must be one or more of (batch, heads, length, width), each above 0, "
            f"got {shapes}"
        )
