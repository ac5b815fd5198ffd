"""`cosformer bench ops`: the op against softmax attention in one run, every number a row."""

import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cosformer import records
from cosformer.bench.candidates import CANDIDATES, PASSES, draw, forward_backward, require_known
from cosformer.bench.checks import Check, against_formula, stream_against_full_pass
from cosformer.bench.timing import busy, growth_exponent, median_times, peak_extra_bytes, threads
from cosformer.ops import State, attention_with_state, step
from cosformer.ops.scratch import forget

GROWTH_FROM = 4096
"""Below this length fixed costs hide how time grows."""


@dataclass(frozen=True)
class Options:
    """Time and memory of the op against PyTorch's softmax attention, in one run."""

    lengths: tuple[int, ...] = tuple(2**n for n in range(8, 17))
    """Sequence lengths."""
    quadratic_up_to: int = 16384
    """Longest sequence given to candidates of quadratic cost."""
    candidates: tuple[str, ...] = ("chunked", "sdpa")
    """Who is measured; ratios are relative to the first."""
    batch: int = 1
    """Sequences per call."""
    heads: int = 8
    """Attention heads."""
    width: int = 64
    """Width of queries, keys and values of one head."""
    causal: bool = True
    """Each token sees the past only; --no-causal for full attention."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Type of q, k and v."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    threads: int = 2
    """CPU threads of torch."""
    repeats: int = 9
    """Samples behind each median."""
    positions: tuple[int, ...] = (10, 1_000_000)
    """Positions at which one decoding step is measured."""
    out: Path | None = None
    """File the rows are added to; results/ops-DEVICE.jsonl if not given."""
    seed: int = 0
    """Seed of the inputs."""

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "width", "threads", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be one or more positive numbers, got {self.lengths}")
        if min(self.positions, default=0) < 0:
            raise ValueError(f"positions must not be negative, got {self.positions}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be one that torch can use here, got cuda")
        require_known(self.candidates)

    @property
    def path(self) -> Path:
        return self.out or Path(f"results/ops-{self.device}.jsonl")

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def run(options: Options) -> int:
    """Check, then measure; 1 if a check fails."""
    if warning := busy():
        print(warning, file=sys.stderr)
    with threads(options.threads):
        checks = check(options)
        for failed in (c for c in checks if not c.passed):
            print(f"check failed, nothing is timed: {failed}", file=sys.stderr)
        if not all(c.passed for c in checks):
            return 1
        print(f"{len(checks)} checks against the float64 formula passed")
        for row in measure(options):
            records.append(options.path, [row])
            print(_line(row), flush=True)
    print(f"rows added to {options.path}")
    return 0


def check(options: Options) -> list[Check]:
    """Every cosFormer candidate against the formula in float64, and steps against the full pass."""
    found = [stream_against_full_pass(device=options.device, seed=options.seed)]
    for name in options.candidates:
        if CANDIDATES[name].is_cosformer:
            found += against_formula(
                CANDIDATES[name].attend,
                causal=options.causal,
                dtype=options.torch_dtype,
                device=options.device,
                seed=options.seed,
            )
    return found


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run, each as soon as it is known."""
    this = records.Run.begin(device=options.device, seed=options.seed)
    times: dict[str, dict[int, float]] = {name: {} for name in PASSES}  # of the first candidate
    for length in sorted(options.lengths):
        inputs = _inputs(options, length, count=4)
        for row in itertools.chain(
            _measure_times(options, this, inputs), _measure_memory(options, this, inputs)
        ):
            if row.what == "time" and row.config["candidate"] == options.candidates[0]:
                times[row.config["pass"]][length] = row.value
            yield row
    for pass_name, by_length in times.items():
        long = {length: value for length, value in by_length.items() if length >= GROWTH_FROM}
        if len(long) > 1:
            at = _setting(options) | {"pass": pass_name, "from": min(long), "to": max(long)}
            exponent = growth_exponent(long)
            yield this.row("growth_exponent", exponent, "", candidate=options.candidates[0], **at)
    if options.positions:
        yield from _measure_steps(options, this)


def _measure_times(
    options: Options, this: records.Run, inputs: list[Tensor]
) -> Iterator[records.Row]:
    """Time of every candidate in each pass, and how often the first fits into each other."""
    first = options.candidates[0]
    for pass_name, make_call in PASSES.items():
        calls = {
            name: make_call(CANDIDATES[name].attend, inputs, causal=options.causal)
            for name in _taking_part(options, inputs[0].shape[2])
        }
        if not calls:
            continue
        times = median_times(calls, repeats=options.repeats, device=options.device)
        at = _setting(options) | {"pass": pass_name, "length": inputs[0].shape[2]}
        for name, milliseconds in times.items():
            yield this.row("time", milliseconds, "ms", candidate=name, **at)
        for name in [n for n in times if n != first and first in times]:
            ratio = times[name] / times[first]
            yield this.row("time_ratio", ratio, "x", candidate=name, relative_to=first, **at)


def _measure_memory(
    options: Options, this: records.Run, inputs: list[Tensor]
) -> Iterator[records.Row]:
    """Peak of forward and backward, output and gradients included, beyond the inputs."""
    at = _setting(options) | {"pass": "forward_backward", "length": inputs[0].shape[2]}
    size = sum(x.nbytes for x in inputs[:3])
    for name in _taking_part(options, inputs[0].shape[2]):
        call = forward_backward(CANDIDATES[name].attend, inputs, causal=options.causal)
        forget()  # memory kept from earlier calls counts as well
        extra = peak_extra_bytes(call, options.device)
        yield this.row("peak_memory", extra / size, "x (q+k+v)", candidate=name, **at)


@torch.no_grad()
def _measure_steps(options: Options, this: records.Run) -> Iterator[records.Row]:
    """One decoding step at each position, the states reached by reading tokens."""
    q, k, v = _inputs(options, 1, count=3)
    states = {position: _state_at(position, options) for position in options.positions}
    calls = {
        str(position): functools.partial(step, q, k, v, state) for position, state in states.items()
    }
    times = median_times(calls, repeats=options.repeats, device=options.device)
    held = {}
    for position, state in states.items():
        at = _setting(options) | {"position": position}
        extra = peak_extra_bytes(calls[str(position)], options.device)
        held[position] = _state_bytes(state) + extra
        yield this.row("step_time", times[str(position)], "ms", **at)
        yield this.row("step_memory", held[position], "bytes", **at)
    first, last = min(held), max(held)
    if first < last:
        at = _setting(options) | {"from": first, "to": last}
        yield this.row("step_memory_growth", held[last] - held[first], "bytes", **at)


@torch.no_grad()
def _state_at(position: int, options: Options) -> State:
    shape = (options.batch, options.heads, options.width, options.width)
    horizon = position + 2**20  # room for the timed steps
    state = State.empty(*shape, horizon=horizon, device=options.device)
    block = _inputs(options, min(position, 2**14), count=3)
    for start in range(0, position, 2**14):
        part = (x[:, :, : position - start] for x in block)
        _, state = attention_with_state(*part, state=state)
    return state


def _state_bytes(state: State) -> int:
    return sum(x.nbytes for x in state if isinstance(x, Tensor))


def _setting(options: Options) -> dict[str, Any]:
    """What all rows of a run have in their config."""
    names = ("batch", "heads", "width", "causal", "dtype", "repeats")
    return {name: getattr(options, name) for name in names}


def _taking_part(options: Options, length: int) -> list[str]:
    return [
        name
        for name in options.candidates
        if length <= options.quadratic_up_to or not CANDIDATES[name].is_quadratic
    ]


def _inputs(options: Options, length: int, *, count: int) -> list[Tensor]:
    shape = (options.batch, options.heads, length, options.width)
    return draw(shape, count, dtype=options.torch_dtype, device=options.device, seed=options.seed)


def _line(row: records.Row) -> str:
    keys = ("candidate", "pass", "length", "position")
    place = " ".join(str(row.config[key]) for key in keys if key in row.config)
    return f"{row.what:<16} {place:<36} {row.value:>12.4g} {row.unit}"
