"""A training run as one frozen value: recipes return it, a run folder keeps it."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cosformer.check import (
    check_choice,
    check_mapping,
    check_positive,
    check_seed,
    check_whole,
)
from cosformer.config import TYPED_BY
from cosformer.models import PRESETS, Kind, ModelConfig
from cosformer.tasks import Facts, Task, Vocabulary, create

Shape = Literal["constant", "cosine", "linear", "inverse-sqrt"]
Objective = Literal["masked", "causal"]
Precision = Literal["float32", "bfloat16"]
OF_TASK = ("kind", "vocabulary", "classes")
"""Fields of a model that follow from the task."""
MOST_SEEDS = 2**30
"""Every step has a seed of 64 bits, made of the run's seed and the number of the step."""
ELSEWHERE = (
    "out", "device", "save_seconds", "tensorboard", "wandb", "plugin", "parallel", "compile",
    "recompute",
)  # fmt: skip
"""Settings that say where and how a run is kept and computed: it may be continued with others."""


@dataclass(frozen=True)
class TaskConfig:
    """What is learnt."""

    name: str
    """A name of `cosformer.tasks.TASKS`, or a known table as `sst2`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task: `length`, `text`, `data`, …; docs/tasks.md has them."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {type(self.name).__name__}")
        check_mapping("options", self.options)
        for name in ("device", "learnt"):
            if name in self.options:
                raise ValueError(f"options.{name} must be left out: the run decides it")

    def create(self, device: str, learnt: Vocabulary | None = None) -> Task:
        return create(self.name, **self.options, learnt=learnt, device=device)


@dataclass(frozen=True)
class Optimiser:
    """AdamW. Weights of matrices decay; embeddings, biases and norms do not."""

    lr: float = 1e-3
    """The highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.01
    """Weight decay of matrices; other parameters have none."""
    clip: float | None = 1.0
    """Gradients of a larger norm are scaled down to it; none: gradients are not clipped."""

    def __post_init__(self) -> None:
        _positive(lr=self.lr, eps=self.eps, clip=self.clip)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay must be finite and at least 0, got {self.weight_decay}")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over time: up to its highest value, then down."""

    shape: Shape = "cosine"
    """After the warm-up: `constant`, `cosine`, `linear` or `inverse-sqrt`."""
    warmup: float = 0.05
    """Share of all steps over which the rate rises."""
    final: float = 0.1
    """Share of the highest rate that `cosine` and `linear` end at."""

    def __post_init__(self) -> None:
        check_choice("shape", self.shape, get_args(Shape))
        for name in ("warmup", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in 0 to 1, got {getattr(self, name)}")

    def rate(self, step: int, steps: int) -> float:
        """Share of the highest rate at step 0 … steps - 1."""
        warmup = round(self.warmup * steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.shape == "constant":
            return 1.0
        if self.shape == "inverse-sqrt":
            return math.sqrt(max(warmup, 1) / (step + 1))
        done = (step - warmup + 1) / (steps - warmup)
        fall = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.final + (1 - self.final) * fall


@dataclass(frozen=True)
class Budget:
    """How much is learnt."""

    steps: int = 1000
    """Updates of the parameters."""
    batch: int = 16
    """Sequences in a step."""
    accumulate: int = 1
    """Parts in which a step goes through the model, for less memory."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate"):
            check_whole(name, getattr(self, name), 1)
        if self.accumulate > self.batch:
            raise ValueError(
                f"accumulate must be at most batch={self.batch}, got {self.accumulate}"
            )


@dataclass(frozen=True)
class Evaluation:
    """How the model is judged while it learns, on the validation split."""

    every: int = 200
    """Steps from one evaluation to the next; the last step always has one."""
    batches: int | None = None
    """Number of batches, spread evenly over the split; none: the whole split."""

    def __post_init__(self) -> None:
        check_whole("every", self.every, 1)
        if self.batches is not None:
            check_whole("batches", self.batches, 1)


@dataclass(frozen=True)
class Pretraining:
    """Learning from the task's own inputs first; the backbone then goes on with the task."""

    objective: Objective = "masked"
    """`masked`: tokens that were hidden; `causal`: the next token."""
    rate: float = 0.15
    """Share of tokens that are hidden, for `masked`."""
    budget: Budget = field(default_factory=Budget)
    """Steps and batches of this phase."""
    lr: float = 1e-3
    """The highest learning rate of this phase; all else is as in the run."""

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, get_args(Objective))
        _positive(lr=self.lr)
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must lie above 0 and up to 1, got {self.rate}")


@dataclass(frozen=True)
class Parallel:
    """How the processes that torchrun has started share a run; they end where one process does.

    The three sizes are those of a DeviceMesh: multiplied, they are the number of processes.
    """

    data: int | None = None
    """So many groups of processes have rows of each batch, and all parameters, of their own; none:
    as many as `shard` and `context` leave."""
    shard: int = 1
    """So many processes share parameters, gradients and AdamW's moments (FSDP), and each has rows
    of its own."""
    context: int = 1
    """So many processes have a stretch of every sequence each (`cosformer.distributed.split`)."""
    timeout: float = 600.0
    """Seconds after which a process that does not answer the others ends the run."""

    def __post_init__(self) -> None:
        for name in ("data", "shard", "context"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        _positive(timeout=self.timeout)

    def sizes(self, processes: int) -> tuple[int, int, int]:
        """`data`, `shard` and `context` of so many processes; an error unless they fit."""
        below = self.shard * self.context
        left, rest = divmod(processes, below)
        data = left if self.data is None else self.data
        if rest or data * below != processes:
            given = "" if self.data is None else f"{self.data} · "
            fits = [n for n in range(1, processes + 1) if processes % n == 0]
            can = f"shard · context can be {', '.join(map(str, fits))}, and data what is left"
            raise ValueError(
                "parallel.data · shard · context must be the number of processes, "
                f"{processes}, got {given}{self.shard} · {self.context}: {can}; "
                "torchrun --nproc-per-node=N starts N processes"
            )
        return data, self.shard, self.context


@dataclass(frozen=True)
class RunConfig:
    """All that decides what a run does."""

    task: TaskConfig
    """What is learnt."""
    out: Path
    """Folder of the run: config, log, checkpoints."""
    preset: str = "tiny"
    """Size of the model: a name of `cosformer.models.PRESETS`."""
    model: Mapping[str, Any] = field(default_factory=dict, metadata={TYPED_BY: ModelConfig})
    """Fields of `ModelConfig` that differ from the preset. The task decides kind, vocabulary and
    classes, and max_length where it is not here."""
    optimiser: Optimiser = field(default_factory=Optimiser)
    """AdamW's numbers."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over time."""
    budget: Budget = field(default_factory=Budget)
    """Steps and batches."""
    extended: tuple[int, ...] = ()
    """Numbers of steps that the run ended with before it was extended to `budget.steps`. A step has
    the learning rate of a run that ends with the first of these numbers not below it."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """When and on how much the model is judged."""
    pretraining: Pretraining | None = None
    """A phase before, on the task's own inputs; none: no such phase."""
    start: Path | None = None
    """Folder of a run whose weights this one begins with; none: new ones."""
    plugin: Path | None = None
    """A Python file that registers mechanisms of the user's own; it is run before the model is
    made, and again where the run is judged or used; none: no such file."""
    precision: Precision = "float32"
    """`bfloat16` computes in it where that is safe; parameters and sums stay float32."""
    compile: bool | None = None
    """Whether torch.compile makes a program of each kind of block, and of the loss. None: where a
    model of tokens is trained on a GPU, by one process or with plain data parallelism; the first
    step then takes longer, and later ones are faster."""
    recompute: bool = False
    """Whether blocks compute again in the backward pass what they would keep for it: every forward
    pass of a block is made twice, and only its input is kept."""
    graph: bool = False
    """Whether steps on a GPU are recorded and replayed (CUDA graphs): a small model waits for
    Python otherwise."""
    average: float | None = None
    """Decay of a moving average of the weights, as 0.999, which is then what is judged; none: the
    weights themselves."""
    seed: int = 0
    """Seed of initial weights, order of samples and dropout."""
    parallel: Parallel = field(default_factory=Parallel)
    """How processes share the work; a run may go on with other ones, and with one alone."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto`: a GPU where there is one, for each process that torchrun has
    started one of its own."""
    log_every: int = 10
    """Steps from one line of the log to the next."""
    save_seconds: float = 60.0
    """At most so much work is lost when the machine stops; 0 saves at every step."""
    tensorboard: bool = False
    """Whether TensorBoard's files are written beside the log."""
    wandb: bool = False
    """Whether Weights & Biases gets what the log gets."""

    def __post_init__(self) -> None:
        if not isinstance(self.out, Path):
            raise TypeError(f"out must be a Path, got {type(self.out).__name__}")
        for name, path in (("start", self.start), ("plugin", self.plugin)):
            if not isinstance(path, Path | None):
                raise TypeError(f"{name} must be a Path or None, got {type(path).__name__}")
        for name, kind in SECTIONS.items():
            given = getattr(self, name)
            if not isinstance(given, kind) and (name, given) != ("pretraining", None):
                found = type(given).__name__
                raise TypeError(f"{name} must be of the class {kind.__name__}, got {found}")
        check_mapping("model", self.model)
        check_choice("preset", self.preset, PRESETS)
        check_choice("precision", self.precision, get_args(Precision))
        check_seed(self.seed, MOST_SEEDS)
        check_whole("log_every", self.log_every, 1)
        if any(early >= late for early, late in itertools.pairwise((0, *self.extended))):
            raise ValueError(
                f"extended must be whole numbers that rise from 1 on, got {self.extended}"
            )
        if self.extended and self.budget.steps <= self.extended[-1]:
            raise ValueError(
                f"budget.steps (--steps) must be above {self.extended[-1]:,}, the steps that the "
                f"run had before it was extended, got {self.budget.steps:,}"
            )
        if self.average is not None and not 0 < self.average < 1:
            raise ValueError(f"average must lie between 0 and 1, got {self.average}")
        if not self.save_seconds >= 0:  # nan is refused as well
            raise ValueError(f"save_seconds must be at least 0, got {self.save_seconds}")
        fields = [each.name for each in dataclasses.fields(ModelConfig)]
        for name in self.model:
            check_choice("model", name, fields)
            if name in OF_TASK:
                raise ValueError(f"model.{name} must be left to the task, got {self.model[name]!r}")

    @property
    def ends(self) -> tuple[int, ...]:
        """The steps after which the run ends, and has ended before it was extended."""
        return (*self.extended, self.budget.steps)

    def model_config(self, facts: Facts) -> ModelConfig:
        """The model for a task with these facts."""
        given = {"max_length": facts.length, **self.model}
        if given["max_length"] < facts.length:
            start = "" if self.start is None else f" for a start from {self.start}"
            raise ValueError(
                f"model.max_length must be at least the task's length {facts.length}, "
                f"got {given['max_length']}{start}"
            )
        classes = facts.classes if facts.asks == "sequence" else None
        return dataclasses.replace(
            PRESETS[self.preset],
            **given,
            kind=kind_of(facts),
            classes=classes,
            vocabulary=facts.vocabulary,
        )


SECTIONS = {
    "task": TaskConfig,
    "optimiser": Optimiser,
    "schedule": Schedule,
    "budget": Budget,
    "evaluation": Evaluation,
    "pretraining": Pretraining,
    "parallel": Parallel,
}
"""Fields of a `RunConfig` and their classes; `pretraining` may also be None."""


def kind_of(facts: Facts) -> Kind:
    """The kind of model that answers what a task asks."""
    if facts.asks == "tokens":
        return "decoder" if facts.causal else "masked-lm"
    return "pairs" if facts.towers == 2 else "classifier"


def _positive(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None:
            check_positive(name, value)
