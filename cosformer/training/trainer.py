"""The loop: steps, log, evaluations and checkpoints of all phases, from where a run stands."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace

from torch import nn

from cosformer.config import plain
from cosformer.models import parameter_count
from cosformer.tasks import Task
from cosformer.tasks.language import vocabulary_of
from cosformer.training.board import Board
from cosformer.training.checkpoint import Checkpoint, read, weights, write
from cosformer.training.config import RunConfig
from cosformer.training.device import resolved
from cosformer.training.evaluation import evaluate, is_better, judged_by
from cosformer.training.feed import feed
from cosformer.training.fingerprint import keep
from cosformer.training.folder import (
    BEST,
    BOARD,
    LAST,
    LOG,
    STATUS,
    VOCABULARY,
    Log,
    adopt,
    is_same_run,
    locked,
    write_json,
)
from cosformer.training.learner import Learner
from cosformer.training.phases import Phase, phases
from cosformer.training.place import Place, place_of
from cosformer.training.progress import Evaluated, Event, Meter, Progress, Started


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

    def __init__(self, config: RunConfig, task: Task | None = None) -> None:
        """`task`: that of the config, where it is made already, as for several runs."""
        import safetensors  # noqa: F401  # missing, it should be so before the work and not after

        self.config, self.device, self._task = config, resolved(config.device), task
        self.place = Place()
        """What the last checkpoint knows, once it is written: what status.json says is there."""

    def events(self) -> Generator[Event, None, None]:
        """Train, telling of every line of the log."""
        out = self.config.out
        task = self._task or self.config.task.create(self.device)
        todo = phases(self.config, task)
        is_same_run(self.config)  # refuses the folder of another before a lock is left in it
        with locked(out), contextlib.ExitStack() as closed:
            adopt(self.config)
            keep(out, task)
            if (vocabulary := vocabulary_of(task)) is not None:
                write_json(out / VOCABULARY, vocabulary.plain())
            found = self._found()
            log = closed.enter_context(Log(out / LOG, self.place.lines))
            board = Board(out / BOARD) if self.config.tensorboard else None
            if board is not None:
                closed.callback(board.close)
            self._status("running")
            try:
                for event in self._phases(todo, found, log):
                    if board is not None:
                        board.add(event)
                    yield event
            except Exception as error:
                with contextlib.suppress(OSError):  # of a full disk: the first error says it
                    self._status("failed", str(error))
                raise
            self._status("finished")

    def _found(self) -> Checkpoint | None:
        """The last checkpoint, if there is one; `place` is where it was written."""
        path = self.config.out / LAST
        if not path.exists():
            return None
        found = read(path)
        self.place = place_of(found, path)
        return found

    def _phases(self, todo: list[Phase], found: Checkpoint | None, log: Log) -> Iterator[Event]:
        before: nn.Module | None = None
        if self.place.phase >= len(todo):
            raise ValueError(f"phase must be below {len(todo)}, got {self.place.phase}")
        if self.place.step > (steps := todo[self.place.phase].budget.steps):
            raise ValueError(f"step must be at most {steps}, got {self.place.step}")
        for number in range(self.place.phase, len(todo)):
            learner = Learner(self.config, todo[number], number)
            place = self.place
            if found is not None:
                learner.restore(found, place.step, str(self.config.out / LAST))
                found = None
            else:
                place = replace(place, phase=number, step=0, metric=None, best=None, metrics={})
                if before is not None:
                    learner.begin_from(before)
            yield _started(learner)
            yield from self._steps(learner, place, log)
            before = learner.judged
        assert before is not None
        self.result = Result(self.place, before)

    def _steps(self, learner: Learner, place: Place, log: Log) -> Iterator[Event]:
        config, budget = self.config, learner.phase.budget
        meter, saved = Meter(learner.device, place.seconds), time.monotonic()
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
                progress = self._logged(learner, meter, log)
                with meter.stopped():
                    yield progress
            judge = step % config.evaluation.every == 0 or is_last
            if judge:
                with meter.beside():
                    place, evaluated = self._evaluated(learner, place, log)
                with meter.stopped():
                    yield evaluated
            if judge or time.monotonic() - saved >= config.save_seconds:
                place = replace(place, step=step, lines=log.lines, seconds=meter.seconds)
                self._save(learner, place, log)
                saved = time.monotonic()

    def _logged(self, learner: Learner, meter: Meter, log: Log) -> Progress:
        loss, norm = learner.read()
        steps = learner.phase.budget.steps
        speed, seconds = meter.read()
        event = Progress(
            phase=learner.phase.name,
            step=learner.step,
            steps=steps,
            loss=loss,
            lr=learner.lr,
            gradient_norm=norm,
            tokens_per_second=speed,
            memory=meter.memory(),
            seconds_left=seconds * (steps - learner.step),
        )
        log.append(asdict(event))
        return event

    def _evaluated(self, learner: Learner, place: Place, log: Log) -> tuple[Place, Evaluated]:
        learner.check()
        phase, settings = learner.phase, self.config.evaluation
        metrics = evaluate(
            learner.judged,
            phase.task,
            "valid",
            batch_size=phase.budget.batch,
            batches=settings.batches,
            precision=self.config.precision,
        )
        name = judged_by(phase.task.facts)
        is_best = is_better(phase.task.facts, metrics[name], place.best)
        best = metrics[name] if is_best else place.best
        place = replace(place, step=learner.step, metric=name, best=best, metrics=metrics)
        if is_best and phase.is_last:
            tensors = {f"model.{name}": t for name, t in weights(learner.judged).items()}
            write(self.config.out / BEST, Checkpoint(tensors, _facts(learner, place)))
        event = Evaluated(phase.name, learner.step, metrics, is_best)
        log.append(asdict(event))
        return place, event

    def _save(self, learner: Learner, place: Place, log: Log) -> None:
        learner.check()
        log.sync()
        write(self.config.out / LAST, Checkpoint(learner.tensors(), _facts(learner, place)))
        self.place = place
        self._status("running")

    def _status(self, state: str, message: str | None = None) -> None:
        status = {"state": state, **asdict(self.place), "message": message}
        write_json(self.config.out / STATUS, status)


def _facts(learner: Learner, place: Place) -> dict[str, object]:
    return {"place": asdict(place), "model": plain(learner.phase.model)}


def _started(learner: Learner) -> Started:
    phase = learner.phase
    return Started(
        phase=phase.name,
        step=learner.step,
        budget=phase.budget,
        model=phase.model,
        parameters=parameter_count(learner.model),
        length=phase.task.facts.length,
        device=str(learner.device),
    )
