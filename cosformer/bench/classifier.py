"""`cosformer reproduce speed`: steps of a text classifier with every mechanism, in turns."""

import contextlib
import functools
import gc
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cosformer import records, tasks
from cosformer.bench.gpu import failed, split_failures
from cosformer.bench.timing import (
    NO_MEMORY,
    attempt,
    foreseen,
    median_times,
    peak_extra_bytes,
    seconds_of,
)
from cosformer.bench.training import Steps
from cosformer.bench.verb import check_counts, keep
from cosformer.check import check_choice, check_positive, check_seed
from cosformer.mechanisms import GROWTH, MECHANISMS
from cosformer.models import ModelConfig, create_model, parameter_count
from cosformer.training import Budget, RunConfig, TaskConfig, autocast, resolved

PASSES = ("training", "inference")
TURNS = 5
"""Mechanisms that take turns: the first five are cosFormer's family, softmax and linear."""
CARRIED = ("skipped", NO_MEMORY)
"""Beginnings of reasons that hold at every greater length as well, up to a colon."""
PER_WEIGHT = 16
"""Bytes of a float32 weight, its gradient and the two moments of AdamW."""
WORDS = {"only": MECHANISMS}


class Size(NamedTuple):
    """The model and the sequences of a table."""

    layers: int
    width: int
    heads: int
    hidden: int
    lengths: Sequence[int]


SIZES = {
    # the classifier of bytes of Long-Range Arena, which the paper timed up to 4,096 tokens
    "full": Size(4, 256, 4, 1_024, (1_024, 2_048, 3_072, 4_096, 16_384, 65_536)),
    "small": Size(1, 16, 2, 32, (64, 256)),
}


class Limits(NamedTuple):
    """What a step may be."""

    tokens: int
    seconds: float
    gigabytes: float


LIMITS = {
    "small": Limits(512, 5.0, 6.0),
    "cpu": Limits(4_096, 10.0, 6.0),
    "cuda": Limits(65_536, 5.0, 32.0),
}
"""Kind of device, or `small` -> its limits, where the options do not say otherwise."""
SHORT = 256
"""Tokens on which what grows faster than n² is tried first: longer sequences may take minutes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the paper's table of speed anew: steps a second of training and of inference, and the
    memory of a step, of a classifier of bytes with every mechanism at 1,024 to 65,536 tokens.
    Mechanisms take turns, five at a time, on the same sequences of a text, none of them padded.
    What cannot be measured is a row with its reason. Stopped at any moment, the same command goes
    on; what has a row is not measured again.

    cosformer reproduce speed --minutes 8

    cosformer reproduce speed --only cosformer softmax

    cosformer reproduce speed --small
    """

    only: tuple[str, ...] = ()
    """Mechanisms (lines of the table) by name; all of them if not given."""
    minutes: float | None = None
    """Minutes after which nothing more is begun; the same command goes on."""
    small: bool = False
    """Whether model and sequences have a toy size, which tries the table out in minutes on two
    cores. Its numbers mean nothing."""
    retry: bool = False
    """Whether what has failed is tried again."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes a GPU where there is one."""
    threads: int = 2
    """CPU threads of torch."""
    repeats: int = 3
    """Samples behind each median."""
    seconds: float | None = None
    """The longest step: lengths at which one would take longer are rows that say so; 10 on a CPU, 5
    elsewhere if not given."""
    gigabytes: float | None = None
    """The most memory of weights, gradients and moments, and on a CPU of a step: what would need
    more is a row that says so; 32 on a GPU, 6 elsewhere if not given."""
    rows: Path | None = None
    """File that rows are added to; results/reproduce-speed.jsonl if not given, and with --small
    runs/reproduce-speed/rows-small.jsonl."""
    seed: int = 0
    """Seed of weights and batches."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in self.only:
            check_choice("only", name, MECHANISMS)
        check_counts(self, "threads", "repeats")
        for name in ("minutes", "seconds", "gigabytes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    @property
    def path(self) -> Path:
        usual = "runs/reproduce-speed/rows-small" if self.small else "results/reproduce-speed"
        return self.rows or Path(f"{usual}.jsonl")

    @property
    def where(self) -> torch.device:
        return torch.device(resolved(self.device))

    @property
    def size(self) -> str:
        return "small" if self.small else "full"

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        return "float32" if self.where.type == "cpu" else "bfloat16"

    @property
    def names(self) -> tuple[str, ...]:
        return self.only or tuple(MECHANISMS)

    @property
    def limits(self) -> Limits:
        """The limits of this device, unless options say otherwise."""
        found = LIMITS["small" if self.small else self.where.type]
        return found._replace(
            seconds=self.seconds or found.seconds, gigabytes=self.gigabytes or found.gigabytes
        )

    def batch(self, length: int) -> int:
        """Sequences in a step: as many as its tokens allow, and one at least."""
        return max(1, self.limits.tokens // length)

    def model(self, mechanism: str, length: int) -> ModelConfig:
        """The classifier around a mechanism; all have sinusoidal positions and no convolution."""
        size = SIZES[self.size]
        return ModelConfig(
            kind="classifier",
            vocabulary=256 + len(tasks.SPECIALS),
            classes=2,
            layers=size.layers,
            width=size.width,
            heads=size.heads,
            hidden=size.hidden,
            mechanism=mechanism,
            max_length=length,
            positions="sinusoidal",
        )

    def config(self, length: int) -> dict[str, Any]:
        """What rows say of all mechanisms at one length."""
        size = SIZES[self.size]
        return {
            "table": "speed",
            "size": self.size,
            "model": {key: value for key, value in size._asdict().items() if key != "lengths"},
            "dtype": self.precision,
            "repeats": self.repeats,
            "batch": self.batch(length),
            "length": length,
        }


def run(options: Options) -> int:
    """0, also where time is up."""
    count, device = options.threads, str(options.where)
    keys = ("candidate", "pass", "batch", "length", "reason")
    rows = measure(options)
    code = keep(rows, options.path, keys=keys, count=count, device=device, option="rows")
    book = Book(options)
    places = [(name, n) for n in SIZES[options.size].lengths for name in options.names]
    ended = sum(book.has(*place) for place in places)
    more = "" if ended == len(places) else "; the same command goes on"
    print(f"{ended} of {len(places)} places of the table are measured or have a reason{more}")
    return code


def measure(options: Options) -> Iterator[records.Row]:
    """All rows that are missing, each as soon as it is known, until time is up."""
    this = records.Run.begin(device=str(options.where), seed=options.seed)
    book = Book(options)
    begin, is_new = time.monotonic(), False
    end = math.inf if options.minutes is None else begin + 60 * options.minutes
    names, lengths = options.names, SIZES[options.size].lengths
    turns = [names[first : first + TURNS] for first in range(0, len(names), TURNS)]
    stretches = functools.cache(functools.partial(Stretches, device=options.where))
    for turn, length in itertools.product(turns, lengths):
        todo = [name for name in turn if not book.has(name, length, options.retry)]
        if not todo:
            continue
        if time.monotonic() >= end:
            break
        is_new = True
        for row in _measure_turn(options, this, book, stretches(length), todo):
            book.add(row)
            yield row
        gc.collect()  # learners refer to themselves, and would keep their memory for a while
    if is_new:
        yield this.row("spent", time.monotonic() - begin, "s", table="speed", size=options.size)


class Book:
    """The rows of this table from this machine: what is known, and what it says of more."""

    def __init__(self, options: Options) -> None:
        self.options, self._rows = options, dict[tuple[Any, ...], dict[str, records.Row]]()
        self.hardware = records.describe_hardware(str(options.where))["name"]
        for row in records.read(options.path) if options.path.exists() else ():
            self.add(row)

    def add(self, row: records.Row) -> None:
        """A row of another machine, size or batch does not count."""
        c = row.config
        if row.what == "spent":
            return
        here = (self.options.size, self.hardware, self.options.batch(c["length"]))
        if (c["size"], row.hardware["name"], c["batch"]) == here:
            place = self._rows.setdefault((c["candidate"], c["pass"], c["length"]), {})
            if row.what == "failed" or "failed" in place:
                place.clear()  # of another time
            place[row.what] = row

    def has(self, name: str, length: int, but_failed: bool = False) -> bool:
        """Whether a place of the table needs nothing more; `but_failed`: no failure counts."""
        wanted = [{"speed", "peak_memory"}, *([] if but_failed else [{"failed"}])]
        found = [self._rows.get((name, each, length), {}).keys() for each in PASSES]
        return all(any(each >= kinds for kinds in wanted) for each in found)

    def reason(self, name: str, pass_name: str, length: int) -> str:
        """Why this had better not be tried, by what the last shorter length took; empty if it may
        be tried."""
        shorter = [n for n in SIZES[self.options.size].lengths if n < length]
        found = [(n, self._rows.get((name, pass_name, n), {})) for n in shorter]
        known = [(n, rows) for n, rows in found if rows.keys() >= {"speed", "peak_memory"}]
        for n, rows in found:
            kind = (
                str(rows["failed"].config["reason"]).partition(":")[0] if "failed" in rows else ""
            )
            if kind in CARRIED:
                return f"{kind}: so it was at {n:,} tokens"
        if not known:
            return ""
        last, rows = known[-1]
        batches = self.options.batch(length) / self.options.batch(last)
        factor = batches * (length / last) ** GROWTH[MECHANISMS[name].traits.growth]
        _, most, room = self.options.limits
        seconds, size = factor / rows["speed"].value, factor * rows["peak_memory"].value
        device = self.options.where.type
        return foreseen(seconds, size, most=most, room=room, device=device)


class Stretches(tasks.Task):
    """Stretches of a text of one length, labelled by chance: how fast they are learnt from does not
    depend on what is learnt."""

    def __init__(self, length: int, device: torch.device, text: str = "python") -> None:
        self._text = tasks.create("lm", text=text, length=length, device=device)
        self.device, self.sizes = device, self._text.sizes
        self.facts = tasks.Facts(256, 2, length, "sequence", "accuracy", 0.5, "a coin")

    def digest(self) -> str:
        return self._text.digest()

    def _batch(self, which: Any, draws: np.random.Generator) -> tasks.Batch:
        found = self._text.batch(**vars(which))
        labels = torch.from_numpy(draws.integers(0, 2, which.batch_size))
        return {**found, "labels": labels.to(self.device)}


def _measure_turn(
    options: Options, this: records.Run, book: Book, task: Stretches, names: Sequence[str]
) -> Iterator[records.Row]:
    """Mechanisms in turns at one length: training, then inference."""
    at = options.config(task.facts.length)
    batch = task.batch("train", seed=options.seed, rank=0, step=0, batch_size=at["batch"])
    tokens = batch["tokens"]
    with contextlib.ExitStack() as feeds:
        training, inference = dict[str, Steps](), dict[str, Answers]()
        for name in names:
            reasons = [book.reason(name, each, at["length"]) for each in PASSES]
            if not all(reasons):
                steps, reason = _steps(options, name, task)
                if steps is not None:
                    feeds.callback(steps.close)
                    answers = Answers(steps.model, tokens, at["dtype"])
                    reason = _first_look(options, name, answers)
                    if not reason:
                        training[name], inference[name] = steps, answers
                        continue
                reasons = [reason] * len(PASSES)
            for pass_name, reason in zip(PASSES, reasons, strict=True):
                yield failed(this, name, reason, {"pass": pass_name, **at})
        yield from _measure_pass(options, this, book, training, {"pass": "training", **at})
        for each in inference.values():
            each.model.eval()
        yield from _measure_pass(options, this, book, inference, {"pass": "inference", **at})


def _measure_pass(
    options: Options,
    this: records.Run,
    book: Book,
    calls: Mapping[str, "Steps | Answers"],
    at: dict[str, Any],
) -> Iterator[records.Row]:
    device = str(options.where)
    reasons = {name: book.reason(name, at["pass"], at["length"]) for name in calls}
    allowed = {name: call for name, call in calls.items() if not reasons[name]}
    working, broken = split_failures(allowed, device)
    for name, reason in (reasons | broken).items():
        if reason:
            yield failed(this, name, reason, at)
    if not working:
        return
    times = median_times(working, repeats=options.repeats, device=device)
    for name in working:
        about = {"candidate": name, "parameters": parameter_count(calls[name].model), **at}
        yield this.row("speed", 1e3 / times[name], "steps/s", **about)
        yield this.row("peak_memory", calls[name].peak_bytes(), "bytes", **about)


class Answers:
    """Inference: the classes of sequences `[B, T]` with every call."""

    def __init__(self, model: nn.Module, tokens: Tensor, precision: str) -> None:
        self.model, self.tokens, self.precision = model, tokens, precision

    @torch.no_grad()
    def __call__(self) -> None:
        with autocast(self.tokens.device, self.precision):
            self.model(self.tokens)

    def peak_bytes(self) -> int:
        """The most that a call holds beyond the model and its batch."""
        return peak_extra_bytes(self, str(self.tokens.device))


def _steps(options: Options, name: str, task: Stretches) -> tuple[Steps | None, str]:
    """The training of a model, or why there is none."""
    length = task.facts.length
    model = options.model(name, length)
    try:
        with torch.device("meta"):
            count = parameter_count(create_model(model))
    except ValueError as error:
        return None, f"refused: {error}"
    needed = count * PER_WEIGHT / 2**30
    if needed > options.limits.gigabytes:
        return None, f"skipped: weights, gradients and moments would need {needed:.0f} GiB"
    config = RunConfig(
        TaskConfig("text"),
        Path(),  # nothing is kept
        budget=Budget(batch=options.batch(length)),
        precision=options.precision,
        seed=options.seed,
    )
    return attempt(lambda: Steps(config, model, task), str(options.where))


def _first_look(options: Options, name: str, call: Answers) -> str:
    """Why what grows faster than n² is not tried, by its time on one short sequence."""
    growth, device = GROWTH[MECHANISMS[name].traits.growth], str(options.where)
    if growth <= 2:
        return ""
    batch, length = call.tokens.shape
    short = Answers(call.model, call.tokens[:1, :SHORT], call.precision)
    seconds, reason = attempt(lambda: min(seconds_of(short, device) for _ in range(2)), device)
    if seconds is None:
        return reason
    seconds *= batch * (length / short.tokens.shape[1]) ** growth
    most = options.limits.seconds
    return foreseen(seconds, 0, most=most, room=math.inf, device=device)
