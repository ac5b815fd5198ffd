"""Two runs that differ by one word, side by side: the same steps on the same batches."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cosformer.bench import Steps, held_bytes, median_times, state_after
from cosformer.models import RECOMMENDED, LanguageModel, parameter_count
from cosformer.records import Row, Run
from cosformer.tasks import Task
from cosformer.training import BEST, Evaluated, Event, Progress, RunConfig, Trainer

COMPARED = (RECOMMENDED, "softmax")
"""Mechanisms, each with the positions, norm and gate with which it learns best."""
POINTS = 40
"""Points of a curve."""
RESERVE = 0.72
"""Share of the time that steps get; the rest is for evaluations and checkpoints."""


@dataclass(frozen=True)
class Pair:
    """A run with either mechanism, planned to end in time."""

    name: str
    task: Task
    configs: Mapping[str, RunConfig]
    rows: tuple[Row, ...]
    """What is known before: what to beat, parameters and memory."""

    @property
    def steps(self) -> int:
        """Steps of each of the two runs."""
        return self.configs[RECOMMENDED].budget.steps

    @property
    def is_judged(self) -> bool:
        """Whether both runs have come to a checkpoint."""
        return all((config.out / BEST).is_file() for config in self.configs.values())


def plan(
    this: Run,
    name: str,
    configs: Mapping[str, RunConfig],
    seconds: float,
    judged: int,
    before: Pair | None = None,
) -> Pair:
    """Both runs, with as many steps as fit into the time; a few steps are timed to know.

    `before`: runs on the same text, whose vocabulary these have, and whose models they begin with.
    """
    learnt = None if before is None else before.task.vocabulary
    task = configs[RECOMMENDED].task.create("cpu", learnt)
    if before is not None and before.is_judged:
        starts = {each: given.out for each, given in before.configs.items()}
        configs = {each: replace(given, start=starts[each]) for each, given in configs.items()}
    facts = task.facts
    rows = [this.row("floor", facts.floor, facts.metric, task=name, floor_is=facts.floor_is)]
    with contextlib.ExitStack() as feeds:
        steps = {
            each: Steps(given, given.model_config(facts), task) for each, given in configs.items()
        }
        for each, step in steps.items():
            feeds.callback(step.close)
            at = {"task": name, "candidate": each}
            rows += [
                this.row(what, value, unit, **at)
                for what, value, unit in _sizes(step, facts.length)
            ]
        milliseconds = sum(median_times(steps, repeats=2).values())
    count = _count(seconds, milliseconds, judged)
    planned = {each: _with_steps(given, count, judged) for each, given in configs.items()}
    return Pair(name, task, planned, tuple(rows))


def learn(this: Run, pair: Pair, deadline: float) -> Iterator[Row]:
    """Rows of losses and metrics as they come; past the deadline (monotonic) no more steps."""
    with contextlib.ExitStack() as open_runs:
        watched = {
            name: open_runs.enter_context(contextlib.closing(_Watched(config, pair.task)))
            for name, config in pair.configs.items()
        }
        running = True
        while running and time.monotonic() < deadline:
            for name, each in watched.items():
                event = each.next()
                running = event is not None
                at = {"task": pair.name, "candidate": name, **each.config}
                yield from _rows(this, event, at)
    for name, each in watched.items():
        at = {"task": pair.name, "candidate": name, **each.config}
        if each.step:
            yield this.row("train_speed", each.tokens / each.seconds, "tokens/s", **at)


def _sizes(step: Steps, length: int) -> Iterator[tuple[str, float, str]]:
    """Numbers of a model, and bytes of a step beyond it; of a decoder, those of a stream."""
    yield "parameters", parameter_count(step.model), ""
    step()  # the optimiser's own memory comes with the first
    yield "peak_memory", step.peak_bytes(), "bytes"
    if isinstance(step.model, LanguageModel):
        state = state_after(step.model, length)
        yield "stream_memory", held_bytes(state), "bytes"


class _Watched:
    """A run whose own seconds are counted, not those in which the other one has its turn."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        self._events = Trainer(config, task).events()
        self.steps, self.step, self.seconds = config.budget.steps, 0, 0.0
        self.length = task.facts.length
        self._tokens = config.budget.batch * self.length

    def next(self) -> Event | None:
        """What happens next; None at the end."""
        begin = time.perf_counter()
        event = next(self._events, None)
        if isinstance(event, Progress):
            self.seconds += time.perf_counter() - begin
            self.step = event.step
        return event

    @property
    def tokens(self) -> int:
        """Tokens learnt from."""
        return self.step * self._tokens

    @property
    def config(self) -> dict[str, Any]:
        """How far learning has come, as the config of a row holds it."""
        return {
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "length": self.length,
        }

    def close(self) -> None:
        self._events.close()


def _rows(this: Run, event: Event | None, at: Mapping[str, Any]) -> Iterator[Row]:
    if isinstance(event, Progress):
        yield this.row("train_loss", event.loss, "nats", **at)
    elif isinstance(event, Evaluated):
        for name, value in event.metrics.items():
            yield this.row(f"valid_{name}", value, "", **at)


def _count(seconds: float, milliseconds: float, judged: int) -> int:
    """Steps in so many seconds, of such milliseconds for a step of each."""
    return max(judged, int(RESERVE * 1e3 * seconds / milliseconds))


def _with_steps(config: RunConfig, count: int, judged: int) -> RunConfig:
    return replace(
        config,
        budget=replace(config.budget, steps=count),
        evaluation=replace(config.evaluation, every=-(-count // judged)),
        log_every=max(1, count // POINTS),
    )
