"""`cosformer bench generation`: tokens a second and memory of a stream, by context."""

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer import records
from cosformer.bench.gpu import failed
from cosformer.bench.hf_generation import transformers_speed
from cosformer.bench.timing import attempt, median_times
from cosformer.bench.verb import OnDevice, check_among, check_options
from cosformer.check import check_choice
from cosformer.mechanisms import MECHANISMS
from cosformer.models import (
    PRESETS,
    Generator,
    LanguageModel,
    ModelConfig,
    ModelState,
    Sampling,
    Stream,
    recommended,
)

HYBRID = "cosformer-gated*7 softmax cosformer-gated*4"
"""One exact layer among the twelve of preset base."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "mechanisms": ("cosformer", "softmax"),
        "preset": "tiny",
        "positions": (100, 8000),
        "batches": (1,),
        "dtype": "float32",
        "sampling": {"temperature": 0.8, "top_k": 40},
    },
    "cuda": {
        "mechanisms": ("cosformer-gated", HYBRID, "softmax"),
        "preset": "base",
        "positions": (2048, 16384, 65536),
        "batches": (1, 64, 256),
        "dtype": "bfloat16",
        "sampling": {"temperature": 0.0},
    },
}
"""Device -> what is measured there where the options do not say; how a token is chosen."""
TOKENS = 16
"""Tokens that one timed call generates on a CPU; before the first it copies the state."""
ROUNDS = 8
"""Rounds of tokens in one sample on a GPU."""
CUDA = "cuda"
PEER = "transformers"
"""The candidate of Hugging Face Transformers."""
READ, FILLED = "read", "filled"
"""How a context came about: read from a prompt, or caches filled with random numbers and positions
set, which costs a step the same."""

WORDS = {"mechanisms": MECHANISMS, "preset": PRESETS}


@dataclass(frozen=True)
class Options(OnDevice):
    """Tokens a second of streams, and memory of each, by position and number of streams.

    On a GPU all numbers of streams are measured after the first position; after the others it is
    the second of them (64). What does not fit the memory is measured with half as many streams.
    """

    name = "generation"
    defaults = DEFAULTS

    mechanisms: tuple[str, ...] | None = None
    """Mechanisms, or patterns of them, to measure; cosformer and softmax on cpu, cosformer-gated, a
    hybrid and softmax on cuda."""
    preset: str | None = None
    """Size of the decoder; tiny, that of the demo, on cpu, base (125M) on cuda."""
    positions: tuple[int, ...] | None = None
    """Tokens before those that are timed; 100 and 8,000 on cpu, 2,048, 16,384, 65,536 on cuda."""
    batches: tuple[int, ...] | None = None
    """Streams at once; 1 on cpu, 1, 64 and 256 on cuda."""
    peer: bool = True
    """Whether Hugging Face Transformers is measured too, on cuda, where it is installed."""
    repeats: int | None = None
    """Samples behind each median; 9 on cpu, 3 on cuda."""
    seed: int = 0
    """Seed of weights and tokens."""

    def __post_init__(self) -> None:
        check_options(self, "positions", "batches")
        check_choice("preset", self.given("preset"), PRESETS)
        able = [name for name, kind in MECHANISMS.items() if kind.traits.state != "none"]
        parts = " ".join(self.given("mechanisms")).split()
        check_among("mechanisms", tuple(part.partition("*")[0] for part in parts), able)
        for mechanism in self.given("mechanisms"):
            self.model(mechanism, 1)

    @property
    def samples(self) -> int:
        return self.repeats or (9 if self.device == "cpu" else 3)

    def model(self, mechanism: str, length: int) -> ModelConfig:
        """The preset with a mechanism, on a GPU with all that is recommended for it.

        But for a convolution: softmax is fastest without.
        """
        fields: dict[str, Any] = {"mechanism": mechanism}
        if self.device == "cuda":
            fields = recommended("lm", mechanism) | {"conv": 0}
        return replace(PRESETS[self.given("preset")], max_length=length, **fields)


class Cell(NamedTuple):
    """How many streams are measured at once, and how many tokens they have had."""

    batch: int
    position: int


def run(options: Options) -> int:
    keys = ("candidate", "to", "batch", "position", "from", "to_position", "reason")
    return options.keep(measure(options), keys)


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run, each as soon as it is known."""
    this = records.Run.begin(device=options.device, seed=options.seed)
    measured = _in_turns if options.device == "cpu" else _one_by_one
    speeds: dict[tuple[str, Cell], float] = {}
    for row in measured(this, options):
        yield row
        if row.what == "generation_speed":
            cell = Cell(row.config["batch"], row.config["position"])
            speeds[row.config["candidate"], cell] = row.value
    yield from _ratios(this, options, speeds)


def _ratios(
    this: records.Run, options: Options, speeds: dict[tuple[str, Cell], float]
) -> Iterator[records.Row]:
    """How many times as fast each is as softmax, of which fewer streams may have fitted."""
    rival = "softmax"
    for (name, cell), speed in speeds.items():
        there = {c.batch: x for (n, c), x in speeds.items() if (n, c.position) == (rival, cell[1])}
        fits = [batch for batch in there if batch <= cell.batch]
        if name == rival or not fits:
            continue
        at = {"candidate": name, "to": rival, **cell._asdict(), "to_batch": max(fits)}
        at["preset"] = options.given("preset")
        yield this.row("generation_speed_ratio", speed / there[max(fits)], "x", **at)


def _in_turns(this: records.Run, options: Options) -> Iterator[records.Row]:
    """Rows of a CPU: all candidates take turns, so that a change in load meets all alike."""
    positions, sampling = options.given("positions"), options.given("sampling")
    about = {"preset": options.given("preset"), "dtype": "float32", "repeats": options.samples}
    calls, held = {}, {}
    for name, batch in itertools.product(options.given("mechanisms"), options.given("batches")):
        model = _model(options, name, max(positions) + TOKENS)
        for position in positions:
            generator = Generator(model, batch, length=_room(model, position + TOKENS))
            stream = generator.read(_prompt(model, position, options.seed))
            many = Sampling(max_new_tokens=TOKENS, **sampling)
            call = functools.partial(_generate, generator, stream, batch, many)
            calls[name, batch, position] = call
            held[name, batch, position] = held_bytes(stream.state)
    times = median_times(calls, repeats=options.samples)
    for (name, batch, position), memory in held.items():
        at = {"candidate": name, "batch": batch, "position": position, "context": READ, **about}
        taken = times[name, batch, position] / TOKENS
        yield this.row("token_time", taken, "ms", **at)
        yield this.row("generation_speed", 1e3 * batch / taken, "tokens/s", **at)
        yield this.row("stream_memory", memory, "bytes", **at)


@torch.no_grad()
def _one_by_one(this: records.Run, options: Options) -> Iterator[records.Row]:
    """Rows of a GPU, one model after the other: their streams fill its memory."""
    batches, positions = options.given("batches"), options.given("positions")
    first, *others = positions
    far = batches[min(1, len(batches) - 1)]
    cells = [Cell(batch, first) for batch in batches] + [Cell(far, n) for n in others]
    about = {"preset": options.given("preset"), "dtype": "bfloat16", "repeats": options.samples}
    about["sampling"] = "greedy"
    for name in options.given("mechanisms"):
        model = _model(options, name, max(positions) + 2**16).to(CUDA, torch.bfloat16)
        for asked in cells:
            cell, found, reason = asked, None, ""
            while found is None:  # half as many streams where all do not fit
                found, reason = attempt(functools.partial(_speed, model, cell, options), CUDA)
                if found is None and ("memory" not in reason or cell.batch == 1):
                    break
                cell = cell if found is not None else cell._replace(batch=cell.batch // 2)
            if found is None:
                yield failed(this, name, reason, {**asked._asdict(), **about})
                continue
            speed, memory = found
            at = {"candidate": name, **cell._asdict(), **about}
            at["context"] = READ if cell.position == first else FILLED
            yield this.row("token_time", 1e3 * cell.batch / speed, "ms", **at)
            yield this.row("generation_speed", speed, "tokens/s", **at)
            yield this.row("stream_memory", memory, "bytes", **at)
            gc.collect()  # streams of one cell must not stand beside those of the next
            torch.cuda.empty_cache()
    for batch in batches[:2] if options.peer else ():
        cell, config = Cell(batch, first), PRESETS[options.given("preset")]
        measured = functools.partial(transformers_speed, config, *cell, options.seed)
        theirs, reason = attempt(measured, CUDA)
        at = {**cell._asdict(), **about, "context": READ}
        if theirs is None:
            yield failed(this, PEER, reason, at)
            continue
        yield this.row("token_time", 1e3 * batch / theirs, "ms", candidate=PEER, **at)
        yield this.row("generation_speed", theirs, "tokens/s", candidate=PEER, **at)


def _speed(model: LanguageModel, cell: Cell, options: Options) -> tuple[float, int]:
    """Tokens a second of so many streams, the median of samples; bytes of one of them."""
    most = (2 + ROUNDS * options.samples) * TOKENS
    generator = Generator(model, cell.batch, length=_room(model, cell.position + most))
    read = cell.position == options.given("positions")[0]
    stream = generator.read(_prompt(model, cell.position if read else 16, options.seed))
    stream = stream if read else _placed(stream, cell.position)
    sampling = Sampling(max_new_tokens=most, **options.given("sampling"))
    for _ in range(cell.batch):
        generator.submit(stream, sampling)
    _take(generator, 2 * TOKENS * cell.batch)
    count, speeds = ROUNDS * TOKENS * cell.batch, []
    for _ in range(options.samples):
        begin = time.perf_counter()
        _take(generator, count)
        speeds.append(count / (time.perf_counter() - begin))
    return statistics.median(speeds), held_bytes(stream.state)


@torch.no_grad()
def state_after(model: LanguageModel, position: int) -> ModelState:
    """The state after so many random tokens, read at once as a prompt is."""
    return model.backbone.stream(torch.tensor([_prompt(model, position, 0)[:-1]]))[1]


def held_bytes(state: Any) -> int:
    """Bytes of all tensors in a state, however deep they lie."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(held_bytes(part) for part in state) if isinstance(state, tuple) else 0


def _take(generator: Generator, count: int) -> None:
    """Go through so many tokens."""
    for _ in itertools.islice(generator, count):
        pass


def _generate(generator: Generator, stream: Stream, batch: int, sampling: Sampling) -> None:
    """The next tokens of copies of a stream, which stays as it is."""
    for _ in range(batch):
        generator.submit(stream, sampling)
    for _ in generator:
        pass


def _placed(stream: Stream, position: int) -> Stream:
    """A stream as if it had read so many tokens: its caches are filled with random numbers.

    Sums keep their size, whatever was read.
    """
    layers = []
    for layer in stream.state.layers:
        held = layer.mechanism
        if hasattr(held, "k"):
            k, v = (x.new_empty(*x.shape[:2], position, x.shape[3]) for x in (held.k, held.v))
            held = held._replace(k=k.normal_(), v=v.normal_(), position=position)
        layers.append(layer._replace(mechanism=held, position=position))
    place = torch.full_like(stream.state.position, position)
    state = stream.state._replace(layers=tuple(layers), position=place, length=position)
    return stream._replace(state=state)


def _prompt(model: LanguageModel, length: int, seed: int) -> list[int]:
    """Random tokens, of which a step reads the last: a stream stands after so many less one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocabulary, (length + 1,), generator=generator)
    return tokens.tolist()


def _room(model: LanguageModel, tokens: int) -> int | None:
    """The `length` of a generator for streams of so many tokens."""
    return tokens + 1 if model.backbone.keeps_tokens else None


def _model(options: Options, mechanism: str, length: int) -> LanguageModel:
    torch.manual_seed(options.seed)
    return LanguageModel(options.model(mechanism, length)).eval()
