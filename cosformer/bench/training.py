"""`cosformer bench training`: steps of one decoder with one mechanism or another, in turns."""

import contextlib
import functools
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from cosformer import records, tasks
from cosformer.bench.flops import peak_flops, training_flops
from cosformer.bench.gpu import failed, split_failures
from cosformer.bench.timing import median_times, peak_extra_bytes
from cosformer.bench.verb import OnDevice, check_among, check_options
from cosformer.check import check_choice
from cosformer.mechanisms import MECHANISMS
from cosformer.models import PRESETS, LanguageModel, ModelConfig, parameter_count
from cosformer.training import Budget, Fed, Learner, Phase, RunConfig, TaskConfig, described, feed

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "preset": "tiny",
        "vocabulary": 1028,
        "lengths": (1024, 4096),
        "tokens": 4096,
        "dtype": "float32",
    },
    "cuda": {
        "preset": "base",
        "vocabulary": None,
        "lengths": (2048, 16384, 65536),
        "tokens": 65536,
        "dtype": "bfloat16",
    },
}
"""Device -> what is measured there where the options do not say."""
DATA = "data"
"""The name under which the making of a batch is timed, beside the mechanisms."""
MOST_STEPS = 10_000
"""Steps in the config of a measured run: far more than are taken."""


WORDS = {"mechanisms": MECHANISMS, "preset": PRESETS}


@dataclass(frozen=True)
class Options(OnDevice):
    """Tokens a second, utilisation and memory of training steps, forward to optimiser.

    The mechanisms take turns within one run, on the same batches; the first is compared with each
    other one. Steps have as many tokens at every length.
    """

    name = "training"
    defaults = DEFAULTS

    mechanisms: tuple[str, ...] = ("cosformer", "softmax")
    """Mechanisms to measure; ratios compare the first with the others."""
    preset: str | None = None
    """Size of the decoder; tiny, as in the demo, on cpu, base (125M) on cuda."""
    vocabulary: int | None = None
    """Size of the vocabulary; 1,028, as in the demo, on cpu, that of the preset on cuda."""
    lengths: tuple[int, ...] | None = None
    """Tokens of a sequence; 1,024 and 4,096 on cpu, 2,048, 16,384 and 65,536 on cuda."""
    tokens: int | None = None
    """Tokens of a step, a multiple of every length; 4,096 on cpu, 65,536 on cuda."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of matrix products, weights stay float32; float32 on cpu, bfloat16 on cuda."""
    compile: bool = True
    """Whether torch.compile makes programs of blocks and loss on cuda."""
    recompute: bool = False
    """Whether blocks compute again in the backward pass what they would keep for it."""
    repeats: int = 5
    """Samples behind each median."""
    seed: int = 0
    """Seed of weights and batches."""

    def __post_init__(self) -> None:
        check_options(self, "vocabulary", "lengths", "tokens")
        check_choice("preset", self.given("preset"), PRESETS)
        check_among("mechanisms", self.mechanisms, MECHANISMS)
        for length in self.given("lengths"):
            if self.given("tokens") % length:
                raise ValueError(
                    f"tokens must be a multiple of every length, got {self.given('tokens')} "
                    f"for {length}"
                )

    def model(self, mechanism: str, length: int) -> ModelConfig:
        """The preset for sequences of this length; the number of weights does not depend on it."""
        preset = PRESETS[self.given("preset")]
        return replace(
            preset,
            vocabulary=self.given("vocabulary") or preset.vocabulary,
            mechanism=mechanism,
            max_length=length,
            positions="sinusoidal",
        )


def run(options: Options) -> int:
    keys = ("candidate", "batch", "length", "reason")
    return options.keep(measure(options), keys)


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run, each as soon as it is known."""
    this = records.Run.begin(device=options.device, seed=options.seed)
    for length in options.given("lengths"):
        yield from _measure_length(options, this, length)


def _measure_length(options: Options, this: records.Run, length: int) -> Iterator[records.Row]:
    """All mechanisms on sequences of one length."""
    torch.compiler.reset()  # what was compiled for other lengths serves nobody any more
    at = _config(options, length)
    task = tasks.create("lm", text="python", length=length, device=options.device)
    with contextlib.ExitStack() as feeds:
        config = _run_config(options, at["batch"])
        steps = {
            name: Steps(config, options.model(name, length), task) for name in options.mechanisms
        }
        for each in steps.values():
            feeds.callback(each.close)
        calls, reasons = split_failures(steps, options.device)
        for name, reason in reasons.items():
            yield failed(this, name, reason, at)
        if not calls:
            return
        loading = {DATA: functools.partial(_batch, task, at["batch"], options.seed)}
        times = median_times({**calls, **loading}, repeats=options.repeats, device=options.device)
        models = {name: cast(LanguageModel, steps[name].model) for name in calls}
        yield from _speeds(this, at, times, models)
        for name in calls:
            yield this.row("first_step", steps[name].first, "s", candidate=name, **at)
            extra = steps[name].peak_bytes()
            yield this.row("peak_memory", extra, "bytes", candidate=name, **at)


class Steps:
    """Training, a step with every call: what a run does between two lines of its log."""

    first: float
    """Seconds that the first step took, in which kernels and blocks are compiled."""

    def __init__(self, config: RunConfig, model: ModelConfig, task: tasks.Task) -> None:
        budget = replace(config.budget, steps=MOST_STEPS)
        phase = Phase("training", task, model, config.optimiser, budget, True)
        self._learner = Learner(replace(config, log_every=MOST_STEPS), phase, 0)
        self._batches = feed(
            task, seed=config.seed, batch_size=budget.batch, begin=0, end=MOST_STEPS
        )

    def __call__(self) -> None:
        begin, is_first = time.perf_counter(), self._learner.step == 0
        self._learner.learn(next(self._batches))
        if is_first:
            self._learner.check()  # which waits for the step
            self.first = time.perf_counter() - begin

    @property
    def model(self) -> nn.Module:
        return self._learner.model

    def peak_bytes(self) -> int:
        """The most that a step holds beyond the model, the optimiser's state and its batch."""
        fed = next(self._batches)
        device = self._learner.device.type
        return peak_extra_bytes(lambda: self._learner.learn(fed), device)

    def close(self) -> None:
        """End the thread that makes batches."""
        cast(Generator[Fed, None, None], self._batches).close()


def _speeds(
    this: records.Run,
    at: Mapping[str, Any],
    times: Mapping[str, float],
    models: Mapping[str, LanguageModel],
) -> Iterator[records.Row]:
    """Milliseconds of steps as tokens a second, ratios, utilisation and the share of the data."""
    tokens, first = at["batch"] * at["length"], next(iter(models))
    peak = peak_flops(this.hardware["name"], at["dtype"])
    for name, model in models.items():
        about = {"candidate": name, "parameters": parameter_count(model), **at}
        speed = 1e3 * tokens / times[name]
        yield this.row("train_speed", speed, "tokens/s", **about)
        yield this.row("data_share", times[DATA] / times[name], "x step", **about)
        if peak is not None:
            used = speed * training_flops(model, at["length"]) / peak
            yield this.row("flops_utilisation", used, "x peak", peak=peak, **about)
        if name != first:
            ratio = times[name] / times[first]
            yield this.row("train_speed_ratio", ratio, "x", of=first, **about)


def _batch(task: tasks.Task, batch_size: int, seed: int) -> Fed:
    """A batch as a run makes it, which does so in a thread of its own while the model learns."""
    return described(task.batch("train", seed=seed, rank=0, step=0, batch_size=batch_size))


def _run_config(options: Options, batch: int) -> RunConfig:
    return RunConfig(
        TaskConfig("lm"),
        Path(),  # nothing is kept
        budget=Budget(batch=batch),
        precision=options.given("dtype"),
        compile=None if options.compile else False,
        recompute=options.recompute,
        seed=options.seed,
    )


def _config(options: Options, length: int) -> dict[str, Any]:
    return {
        "preset": options.given("preset"),
        "dtype": options.given("dtype"),
        "compile": options.compile and options.device == "cuda",
        "recompute": options.recompute,
        "repeats": options.repeats,
        "batch": options.given("tokens") // length,
        "length": length,
    }
