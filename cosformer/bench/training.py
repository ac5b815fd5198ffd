"""`cosformer bench training`: steps of one decoder with one mechanism or another, in turns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer import records, tasks
from cosformer.bench.flops import peak_flops, training_flops
from cosformer.bench.gpu import failed, split_failures
from cosformer.bench.rows import keep
from cosformer.bench.timing import Call, median_times, peak_extra_bytes
from cosformer.mechanisms import MECHANISMS
from cosformer.models import PRESETS, LanguageModel, ModelConfig, parameter_count
from cosformer.ops.scratch import forget

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"preset": "mini", "lengths": (1024, 4096), "tokens": 8192, "dtype": "float32"},
    "cuda": {
        "preset": "base",
        "lengths": (2048, 16384, 65536),
        "tokens": 65536,
        "dtype": "bfloat16",
    },
}
"""Device -> what is measured there where the options do not say."""
DATA = "data"
"""What stands beside the mechanisms: the making of a batch."""


@dataclass(frozen=True)
class Options:
    """Tokens a second, utilisation and memory of training steps, forward to optimiser.

    The mechanisms take turns within one run, on the same batches; the first is compared with each
    other one. Steps have as many tokens at every length.
    """

    mechanisms: tuple[str, ...] = ("cosformer", "softmax")
    """Who is measured, ratios relative to the others."""
    preset: str | None = None
    """Size of the decoder; mini (that of the demo) on cpu, base (125M) on cuda."""
    lengths: tuple[int, ...] | None = None
    """Tokens of a sequence; 1,024 and 4,096 on cpu, 2,048, 16,384 and 65,536 on cuda."""
    tokens: int | None = None
    """Tokens of a step, a multiple of every length; 8,192 on cpu, 65,536 on cuda."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the products, weights staying float32; float32 on cpu, bfloat16 on cuda."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    compile: bool = False
    """Compile model and loss as a whole by torch.compile."""
    threads: int = 2
    """CPU threads of torch."""
    repeats: int = 5
    """Samples behind each median."""
    out: Path | None = None
    """File the rows are added to; results/training-DEVICE.jsonl if not given."""
    seed: int = 0
    """Seed of weights and batches."""

    def __post_init__(self) -> None:
        for name in ("threads", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        if not self.mechanisms or not set(self.mechanisms) <= MECHANISMS.keys():
            known = ", ".join(MECHANISMS)
            raise ValueError(f"mechanisms must be among {known}, got {self.mechanisms}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be one that torch can use here, got cuda")
        for length in self.given("lengths"):
            if length < 1 or self.given("tokens") % length:
                raise ValueError(
                    f"tokens must be a multiple of every length, got {self.given('tokens')} "
                    f"for {length}"
                )

    @property
    def path(self) -> Path:
        return self.out or Path(f"results/training-{self.device}.jsonl")

    def given(self, name: str) -> Any:
        """The option, or what stands for it on this device."""
        value = getattr(self, name)
        return DEFAULTS[self.device][name] if value is None else value

    def model(self, mechanism: str, length: int) -> ModelConfig:
        """The preset for sequences of this length, with as many weights at any."""
        return replace(
            PRESETS[self.given("preset")],
            mechanism=mechanism,
            max_length=length,
            positions="sinusoidal",
        )


def run(options: Options) -> int:
    keys = ("candidate", "batch", "length", "reason")
    return keep(measure(options), options.path, keys=keys, count=options.threads)


def measure(options: Options) -> Iterator[records.Row]:
    """All rows of one run, each as soon as it is known."""
    this = records.Run.begin(device=options.device, seed=options.seed)
    for length in options.given("lengths"):
        yield from _measure_length(options, this, length)


def _measure_length(options: Options, this: records.Run, length: int) -> Iterator[records.Row]:
    """All mechanisms on sequences of one length."""
    if options.compile:
        torch.compiler.reset()  # what was compiled for other lengths serves nobody any more
    batch = options.given("tokens") // length
    draw = Batches(text_task(options, length), batch, options.seed)
    at = _config(options, length, batch)
    models, steps = dict[str, LanguageModel](), dict[str, Call]()
    for name in options.mechanisms:
        models[name] = _model(options, name, length)
        steps[name] = training_step(options, models[name], draw)
    working, reasons = split_failures(steps, options.device)
    for name, reason in reasons.items():
        yield failed(this, name, reason, at)
    if not working:
        return
    times = median_times({**working, DATA: draw}, repeats=options.repeats, device=options.device)
    yield from _speeds(this, at, times, {name: models[name] for name in working})
    for name, call in working.items():
        forget()  # memory kept from earlier calls counts as well
        extra = peak_extra_bytes(call, options.device)
        yield this.row("peak_memory", extra, "bytes", candidate=name, **at)


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


def text_task(options: Options, length: int) -> tasks.Task:
    """Text that every machine has."""
    return tasks.create("lm", text="python", length=length, device=options.device)


class Batches:
    """The next batch of a task with every call."""

    def __init__(self, task: tasks.Task, batch_size: int, seed: int) -> None:
        self.task, self.batch_size, self.seed, self.step = task, batch_size, seed, 0

    def __call__(self) -> tasks.Batch:
        place = {"seed": self.seed, "rank": 0, "step": self.step}
        self.step += 1
        return self.task.batch("train", batch_size=self.batch_size, **place)


def training_step(options: Options, model: LanguageModel, draw: Batches) -> Call:
    """Batch, forward, backward and AdamW, as a run of training makes them."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dtype = getattr(torch, options.given("dtype"))

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(options.device, dtype, enabled=dtype != torch.float32):
            return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    forward = torch.compile(loss, dynamic=False) if options.compile else loss

    def step() -> None:
        batch = draw()
        torch.autograd.backward(forward(batch["tokens"], batch["labels"]))
        optimiser.step()
        optimiser.zero_grad()

    return step


def _model(options: Options, mechanism: str, length: int) -> LanguageModel:
    torch.manual_seed(options.seed)
    return LanguageModel(options.model(mechanism, length)).to(options.device)


def _config(options: Options, length: int, batch: int) -> dict[str, Any]:
    return {
        "preset": options.given("preset"),
        "dtype": options.given("dtype"),
        "compile": options.compile,
        "repeats": options.repeats,
        "batch": batch,
        "length": length,
    }
