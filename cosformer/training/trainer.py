"""The loop: steps, log, evaluations and checkpoints of all phases, from where a run stands."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import nn

from cosformer.config import plain
from cosformer.training.checkpoint import Checkpoint, read, weights, write
from cosformer.training.config import RunConfig
from cosformer.training.evaluation import evaluate, is_better, judged_by
from cosformer.training.feed import feed
from cosformer.training.folder import BEST, LAST, LOG, STATUS, Log, adopt, locked, write_json
from cosformer.training.learner import Diverged, Learner
from cosformer.training.phases import phases
from cosformer.training.progress import Evaluated, Event, Meter, Progress


@dataclass(frozen=True)
class Place:
    """Where a run stands: what its checkpoint knows besides tensors."""

    phase: int = 0
    step: int = 0
    """Steps of the phase that are done."""
    lines: int = 0
    """Of the log."""
    seconds: float = 0.0
    """Spent so far."""
    best: float | None = None
    """Of the metric that the phase's task is judged by."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    place: Place
    model: nn.Module
    """As it was after the last step."""


def train(config: RunConfig, report: Callable[[Event], None] | None = None) -> Result:
    """Train until the end, from wherever the run in `config.out` stands."""
    trainer = Trainer(config)
    for event in trainer.events():
        if report is not None:
            report(event)
    return trainer.result


class Trainer:
    """A run as an iterator of what happens in it, so that two can go side by side.

    >>> for event in Trainer(config).events():
    ...     print(event)
    """

    result: Result
    """Set when the events have ended."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.device = config, resolved(config.device)
        self.place = Place()

    def events(self) -> Iterator[Event]:
        """Train, telling of every line of the log."""
        with locked(self.config.out):
            adopt(self.config)
            found = self._found()
            log = Log(self.config.out / LOG, self.place.lines)
            try:
                self._status("running")
                yield from self._phases(found, log)
                self._status("finished")
            except Diverged as error:
                self._status("failed", str(error))
                raise
            finally:
                log.close()

    def _found(self) -> Checkpoint | None:
        """The last checkpoint, if there is one; `place` is where it was written."""
        path = self.config.out / LAST
        if not path.exists():
            return None
        found = read(path)
        self.place = Place(**found.facts["place"])
        return found

    def _phases(self, found: Checkpoint | None, log: Log) -> Iterator[Event]:
        task = self.config.task.create(self.device)
        todo = phases(self.config, task)
        before: nn.Module | None = None
        for number in range(self.place.phase, len(todo)):
            learner = Learner(self.config, todo[number], number)
            if found is not None:
                learner.restore(found, self.place.step)
                found = None
            else:
                self.place = replace(self.place, phase=number, step=0, best=None, metrics={})
                if before is not None:
                    learner.begin_from(before)
            yield from self._steps(learner, log)
            before = learner.judged
        assert before is not None
        self.result = Result(self.place, before)

    def _steps(self, learner: Learner, log: Log) -> Iterator[Event]:
        config, budget = self.config, learner.phase.budget
        meter = Meter(learner.device)
        earlier, saved = self.place.seconds, time.monotonic()
        batches = feed(
            learner.phase.task,
            seed=config.seed,
            batch_size=budget.batch,
            begin=learner.step,
            end=budget.steps,
        )
        for fed in batches:
            learner.learn(fed)
            meter.add(fed.tokens)
            step = learner.step
            is_last = step == budget.steps
            if step % config.log_every == 0 or is_last:
                yield self._logged(learner, meter, log)
            judge = step % config.evaluation.every == 0 or is_last
            if judge:
                began = time.perf_counter()
                yield self._evaluated(learner, log)
                meter.skip(time.perf_counter() - began)
            if judge or time.monotonic() - saved >= config.save_seconds:
                seconds = earlier + time.perf_counter() - meter.began
                self.place = replace(self.place, step=step, lines=log.lines, seconds=seconds)
                self._save(learner, log)
                saved = time.monotonic()

    def _logged(self, learner: Learner, meter: Meter, log: Log) -> Progress:
        loss, norm = learner.read(clear=True)
        steps = learner.phase.budget.steps
        left = meter.left(steps - learner.step)
        event = Progress(
            learner.phase.name, learner.step, steps, loss, learner.lr, norm,
            meter.speed(), meter.memory(), left,
        )  # fmt: skip
        log.append(asdict(event))
        return event

    def _evaluated(self, learner: Learner, log: Log) -> Evaluated:
        learner.read(clear=False)  # nothing that has diverged is judged, or kept
        phase, settings = learner.phase, self.config.evaluation
        metrics = evaluate(
            learner.judged,
            phase.task,
            "valid",
            batch_size=phase.budget.batch,
            batches=settings.batches,
            precision=self.config.precision,
        )
        value = metrics[judged_by(phase.task.facts)]
        is_best = is_better(phase.task.facts, value, self.place.best)
        best = value if is_best else self.place.best
        self.place = replace(self.place, step=learner.step, best=best, metrics=metrics)
        if is_best and phase.is_last:
            tensors = {f"model.{name}": t for name, t in weights(learner.judged).items()}
            write(self.config.out / BEST, Checkpoint(tensors, self._facts(learner)))
        event = Evaluated(phase.name, learner.step, metrics, is_best)
        log.append(asdict(event))
        return event

    def _save(self, learner: Learner, log: Log) -> None:
        learner.read(clear=False)
        log.sync()
        write(self.config.out / LAST, Checkpoint(learner.tensors(), self._facts(learner)))
        self._status("running")

    def _facts(self, learner: Learner) -> dict[str, object]:
        return {"place": asdict(self.place), "model": plain(learner.phase.model)}

    def _status(self, state: str, message: str | None = None) -> None:
        status = {"state": state, **asdict(self.place), "message": message}
        write_json(self.config.out / STATUS, status)


def resolved(device: str) -> str:
    """The device that is meant."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be there, got {device!r} on a machine without a GPU")
    return device
