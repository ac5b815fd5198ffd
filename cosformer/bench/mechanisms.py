"""`cosformer bench mechanisms`: every mechanism against the length, every outcome a row."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cosformer import records
from cosformer.bench.candidates import PASSES
from cosformer.bench.cells import Cell, Setup
from cosformer.bench.fla import PEERS, OfFla, present
from cosformer.bench.gpu import failed, graph_times
from cosformer.bench.inputs import tokens_first
from cosformer.bench.timing import (
    Call,
    attempt,
    foreseen,
    median_times,
    peak_extra_bytes,
    seconds_of,
)
from cosformer.bench.verb import OnDevice, check_options
from cosformer.check import check_choice
from cosformer.mechanisms import GROWTH, MECHANISMS, Mechanism, create

GROWTH_FROM = 4096
"""Below this length fixed costs hide how time grows."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"lengths": tuple(2**n for n in range(8, 15)), "dtype": "float32"},
    "cuda": {"lengths": tuple(2**n for n in range(8, 17)), "dtype": "bfloat16"},
}
"""Device -> what is measured there where the options do not say."""
FURTHEST = 4
"""How many times as long a sequence may be as the last, for its time to be guessed: what does not
grow, like the gradient of a table, counts as if it did."""
FIRST = 256
"""The length that is tried before any longer one."""
OPTIONS: dict[str, dict[str, Any]] = {
    "linformer": {"max_length": 65536},
    "synthesizer": {"max_length": 4096},  # its table is as large as all scores
    "synthesizer-factorised": {"max_length": 65536},
    "synthesizer-dense": {"max_length": 65536},
}
"""What a mechanism cannot be measured without: a maximum that reaches the longest sequence."""


WORDS = {"names": (*MECHANISMS, *PEERS)}


@dataclass(frozen=True)
class Options(OnDevice):
    """Forward, forward + backward and peak memory of all mechanisms against length."""

    name = "mechanisms"
    defaults = DEFAULTS

    names: tuple[str, ...] = ()
    """Mechanisms to measure; all if not given. fla-NAME is that of flash-linear-attention."""
    lengths: tuple[int, ...] | None = None
    """Sequence lengths; 256 to 16,384 on cpu, to 65,536 on cuda if not given."""
    batch: int = 1
    """Sequences per call."""
    heads: int = 8
    """Attention heads."""
    width: int = 64
    """Width of queries, keys and values of one head."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of q, k and v; float32 on cpu, bfloat16 on cuda."""
    repeats: int = 5
    """Samples behind each median."""
    seconds: float = 10.0
    """The longest call: lengths at which one would take longer are rows that say so."""
    gigabytes: float = 6.0
    """The most memory of a call on a cpu: lengths that would need more are rows that say so."""
    seed: int = 0
    """Seed of the inputs."""

    def __post_init__(self) -> None:
        check_options(self, "batch", "heads", "width", "lengths")
        for name in ("seconds", "gigabytes"):
            if not getattr(self, name) > 0:  # infinity is no limit
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in self.names:
            check_choice("names", name, WORDS["names"])
        for name in set(self.names).intersection(PEERS) - set(present(self.device)):
            raise ValueError(f"names with {name} need a GPU and fla-core, got device={self.device}")

    @property
    def setup(self) -> Setup:
        dtype = getattr(torch, self.given("dtype"))
        return Setup(self.device, dtype, self.repeats, self.seed)


def run(options: Options) -> int:
    keys = ("candidate", "pass", "length", "reason")
    return options.keep(measure(options), keys)


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run, each as soon as it is known."""
    this = records.Run.begin(device=options.device, seed=options.seed)
    for name in options.names or (*MECHANISMS, *present(options.device)):
        mechanism, reason = attempt(functools.partial(_make, options, name), options.device)
        if mechanism is None:
            yield failed(this, name, reason, {})
            continue
        causal = mechanism.traits.causal != "no"
        if not causal:
            yield failed(this, name, "refused: it has no causal form", {"causal": True})
        for pass_name in PASSES:
            yield from _measure_pass(options, this, name, mechanism, pass_name, causal)


def _measure_pass(
    options: Options,
    this: records.Run,
    name: str,
    mechanism: Mechanism,
    pass_name: str,
    causal: bool,
) -> Iterator[records.Row]:
    """Time and memory by length; lengths take turns, so that a changing pace bends no curve."""
    setup, calls, peaks = options.setup, {}, {}
    sizes = Cell(options.batch, options.heads, 0, options.width)
    at = {"pass": pass_name, **setup.config(sizes, causal=causal)}
    limit = mechanism.traits.max_length

    def make(length: int) -> Call:
        return _call(setup, mechanism, sizes._replace(length=length), pass_name, causal)

    guard = _Guard(options, GROWTH[mechanism.traits.growth], make)
    for length in sorted(options.given("lengths")):
        if limit is not None and length > limit:
            call, reason = None, f"refused: it takes up to {limit} tokens"
        else:
            call, reason = guard.call(length)
        if call is None:
            yield failed(this, name, reason, {**at, "length": length})
            continue
        calls[length], peaks[length] = call, guard.bytes
        numbers = 3 * options.batch * options.heads * length * options.width
        ratio = guard.bytes / (numbers * setup.dtype.itemsize)
        yield this.row("peak_memory", ratio, "x (q+k+v)", candidate=name, **at, length=length)
    if not calls:
        return
    times = median_times(calls, repeats=setup.repeats, device=setup.device)
    for length, milliseconds in times.items():
        yield this.row("time", milliseconds, "ms", candidate=name, **at, length=length)
    if options.device == "cuda":
        for length, milliseconds in graph_times(calls, setup).items():
            yield this.row("time_graph", milliseconds, "ms", candidate=name, **at, length=length)
    about = {"candidate": name, **at}
    yield from _growth(this, "growth_exponent", times, about)
    yield from _growth(this, "memory_growth_exponent", peaks, about)


class _Guard:
    """Makes calls, but for those that would take too long, or all of the memory."""

    def __init__(self, options: Options, exponent: float, make: Callable[[int], Call]) -> None:
        self.options, self.exponent, self.make = options, exponent, make
        self.length, self.seconds, self.bytes, self.broken = 0, 0.0, 0, ""

    def call(self, length: int) -> tuple[Call | None, str]:
        """A call that was made once, and "", or None and why there is none.

        Shorter lengths are tried on the way: no guess goes further than `FURTHEST`.
        """
        while (between := self.length * FURTHEST or FIRST) < length:
            if self._try(between)[0] is None:
                break
        return self._try(length)

    def _try(self, length: int) -> tuple[Call | None, str]:
        if reason := self._reason(length):
            return None, reason
        call, device = self.make(length), self.options.device
        peak, self.broken = attempt(functools.partial(peak_extra_bytes, call, device), device)
        if peak is None:
            return None, self.broken
        # the faster of two: a busy moment must not rule out the lengths after this one
        self.seconds = min(seconds_of(call, device), seconds_of(call, device))
        self.length, self.bytes = length, peak
        return call, ""

    def _reason(self, length: int) -> str:
        """Why this length had better not be tried, from what the last one took."""
        if self.broken or not self.length:
            return self.broken
        factor = (length / self.length) ** self.exponent
        most, room, device = self.options.seconds, self.options.gigabytes, self.options.device
        seconds, size = factor * self.seconds, factor * self.bytes
        return foreseen(seconds, size, most=most, room=room, device=device)


def _make(options: Options, name: str) -> Mechanism:
    torch.manual_seed(options.seed)
    sizes = options.heads, options.width
    made = PEERS[name](*sizes) if name in PEERS else create(name, *sizes, **OPTIONS.get(name, {}))
    return made.to(device=options.device, dtype=options.setup.dtype).eval()


def _call(setup: Setup, mechanism: Mechanism, cell: Cell, pass_name: str, causal: bool) -> Call:
    """One pass; gradients are those of q, k, v, controls and parameters, as in training."""
    q, k, v, gradient = setup.draw(cell, count=4)
    names = mechanism.traits.controls
    controls = {name: gradient[..., n].contiguous() for n, name in enumerate(names)}
    if isinstance(mechanism, OfFla):  # each finds its inputs as it likes them
        q, k, v, gradient = (tokens_first(x) for x in (q, k, v, gradient))
        controls = {name: tokens_first(x) for name, x in controls.items()}
    if pass_name == "forward":

        @torch.no_grad()
        def forward() -> object:
            return mechanism(q, k, v, causal=causal, controls=controls)

        return forward
    tokens = [x.detach().requires_grad_() for x in (q, k, v, *controls.values())]
    wanted = [*tokens, *(p for p in mechanism.parameters() if p.requires_grad)]
    given = dict(zip(controls, tokens[3:], strict=True))

    def both() -> object:
        out, _ = mechanism(*tokens[:3], causal=causal, controls=given)
        # not every mechanism looks at q and k
        return torch.autograd.grad(out, wanted, gradient, allow_unused=True)

    return both


def _growth(
    this: records.Run, what: str, by_length: Mapping[int, float], at: Mapping[str, Any]
) -> Iterator[records.Row]:
    long = {length: value for length, value in by_length.items() if length >= GROWTH_FROM}
    if len(long) > 1 and min(long.values()) > 0:
        between = {"from": min(long), "to": max(long)}
        yield this.row(what, records.growth_exponent(long), "", **at, **between)
