"""What a run tells while it goes on, and the line that shows it."""

import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cosformer.models import ModelConfig
from cosformer.training.config import Budget


@dataclass(frozen=True)
class Started:
    """A phase begins, or goes on."""

    phase: str
    step: int
    """Steps of it that were done before."""
    budget: Budget
    model: ModelConfig
    parameters: int
    length: int
    device: str
    notes: tuple[str, ...] = ()
    """What a user should know about the data; a sentence each."""
    mesh: tuple[int, int, int] = (1, 1, 1)
    """Numbers of processes by `data`, `shard` and `context`."""

    @property
    def _threads(self) -> str:
        count = torch.get_num_threads()
        return f" ({count} thread{'s'[: count > 1]})" if self.device == "cpu" else ""

    @property
    def _processes(self) -> str:
        if (count := math.prod(self.mesh)) == 1:
            return ""
        data, shard, context = self.mesh
        return f" in each of {count} processes (data {data}, shard {shard}, context {context})"

    def __str__(self) -> str:
        model, budget = self.model, self.budget
        begun = f", from step {self.step:,} on" if self.step else ""
        return (
            f"{self.phase}: {model.mechanism} {model.kind}, {model.layers} layers of "
            f"{model.width}, {self.parameters:,} parameters; {budget.steps:,} steps of "
            f"{budget.batch} × {self.length:,} tokens on {self.device}{self._threads}"
            f"{self._processes}{begun}"
        )


@dataclass(frozen=True)
class Progress:
    """What came of the steps since the last line of the log."""

    phase: str
    step: int
    steps: int
    loss: float
    """Mean loss of these steps."""
    lr: float
    gradient_norm: float
    """Norm of the gradient of the last step, before it was clipped."""
    tokens_per_second: float
    memory: int
    """Most bytes held so far: by tensors on a GPU, or by the process on a CPU."""
    seconds_left: float
    """Until this phase ends, at the speed of these steps, without evaluations."""

    def __str__(self) -> str:
        width = len(str(self.steps))
        return (
            f"{self.phase} {self.step:>{width}}/{self.steps}  loss {number(self.loss)}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {self.memory / 2**30:.2f} GiB  "
            f"{duration(self.seconds_left)} left"
        )


@dataclass(frozen=True)
class Evaluated:
    """The model was judged on the validation split."""

    phase: str
    step: int
    metrics: dict[str, float]
    best: bool
    """Better than ever before in this phase."""

    def __str__(self) -> str:
        found = "  ".join(f"{name} {number(value)}" for name, value in self.metrics.items())
        return f"{self.phase} {self.step}: {found}{'  (best)' if self.best else ''}"


Event = Started | Progress | Evaluated
"""What a run reports: a phase began, steps were done, or the model was judged."""


class Meter:
    """How fast steps go, and how long the run has taken."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        """`seconds`: what the run has taken before."""
        self.device = device
        self._since = time.perf_counter()
        self._began = self._since - seconds
        self._tokens = self._steps = 0

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        self._steps += 1

    @property
    def seconds(self) -> float:
        """What the run has taken so far."""
        return time.perf_counter() - self._began

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Time that is not spent on steps, as that of an evaluation."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Time that is not the run's, as that of another run beside it."""
        begin = time.perf_counter()
        try:
            with self.beside():
                yield
        finally:
            self._began += time.perf_counter() - begin

    def read(self) -> tuple[float, float]:
        """Tokens a second and seconds a step since the last reading."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        found = self._tokens / seconds, seconds / max(self._steps, 1)
        self._tokens, self._steps, self._since = 0, 0, now
        return found

    def memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def number(value: float) -> str:
    """`0.1234`, and `1.23e+12` where that has too many digits."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """`45 s`, `3:20 min`, `2:05 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
