"""The loop: steps, log, evaluations and checkpoints of all phases, from where a run stands."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from cosformer.config import plain
from cosformer.models import parameter_count
from cosformer.tasks import Task
from cosformer.training.board import Board
from cosformer.training.checkpoint import Checkpoint, read, weights, write
from cosformer.training.config import RunConfig
from cosformer.training.device import resolved
from cosformer.training.evaluation import evaluate, is_better, judged_by
from cosformer.training.feed import Fed, feed
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
from cosformer.training.interrupt import uninterrupted
from cosformer.training.learner import Diverged, Learner
from cosformer.training.loading import create_task, model_of
from cosformer.training.phases import Phase, phases
from cosformer.training.place import Place, place_of
from cosformer.training.plugin import load_plugin
from cosformer.training.possible import require_possible
from cosformer.training.progress import Evaluated, Event, Meter, Progress, Started
from cosformer.training.start import beginning, require_fit


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    place: Place
    model: nn.Module
    """The model after the last step; the moving average where there is one."""


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
        """`task`: the task of the config, if it exists already, as for several runs on one task."""
        import safetensors  # noqa: F401  # if it is missing, say so before the work

        if config.plugin is not None:
            load_plugin(config.plugin)
            config = replace(config, plugin=config.plugin.resolve())
        self.config, self.device, self._task = config, resolved(config.device), task
        if config.graph and torch.device(self.device).type != "cuda":
            raise ValueError(f"graph must be false on {self.device}, which has none, got True")
        self._board = Board(config.out / BOARD) if config.tensorboard else None
        self.place = Place()
        """Where the run stood at its last checkpoint; status.json says the same."""

    def events(self) -> Generator[Event, None, None]:
        """Train, telling of every line of the log."""
        out = self.config.out
        start = beginning(self.config)
        known = out if start is None else start.folder
        task = self._task or create_task(self.config, known, self.device)
        todo = phases(self.config, task)
        if start is not None:
            require_fit(todo[0], start)
        if not is_same_run(self.config):  # another's folder is refused before a lock is in it
            require_possible(todo)
        with locked(out), contextlib.ExitStack() as closed:
            adopt(self.config)
            found = self._found()
            keep(out, task)
            if found is not None:
                self._require_model(found, todo[self.place.phase])
            if task.vocabulary is not None:
                write_json(out / VOCABULARY, task.vocabulary.plain())
            names = [phase.name for phase in todo]
            log = closed.enter_context(Log(out / LOG, lambda row: self._is_done(row, names)))
            if self._board is not None:
                closed.callback(self._board.close)
            self._status("running")
            try:
                before = None if start is None else start.model
                for event in self._phases(todo, found, before, log):
                    if self._board is not None:
                        self._board.add(event)
                    yield event
            except Exception as error:
                with contextlib.suppress(OSError):  # the disk may be full: the first error says so
                    self._status("failed", str(error))
                raise
            self._status("finished")

    def _found(self) -> Checkpoint | None:
        """The last checkpoint, if there is one; `place` is where it was written."""
        path = self.config.out / LAST
        if not path.exists():
            return None
        found = read(path)
        self.place = place_of(found, path, self.config)
        return found

    def _require_model(self, found: Checkpoint, phase: Phase) -> None:
        """An error if a checkpoint says that it is of another phase than its model is."""
        path = self.config.out / LAST
        if plain(model_of(found, path)) != plain(phase.model):
            raise ValueError(f"checkpoint {path} must be of the model of {phase.name}, got another")

    def _is_done(self, row: dict[str, Any], names: list[str]) -> bool:
        """Whether the last checkpoint has what a line of the log tells."""
        told, here = (names.index(row["phase"]), row["step"]), (self.place.phase, self.place.step)
        is_judged_again = told == here and "metrics" in row and self.place.pending
        return told <= here and not is_judged_again

    def _phases(
        self, todo: list[Phase], found: Checkpoint | None, before: nn.Module | None, log: Log
    ) -> Iterator[Event]:
        """From the checkpoint that was found, else from the model `before`, else from nothing."""
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
        """All steps of a phase; an interrupt loses none, nor does a reader that stops reading."""
        budget = learner.phase.budget
        meter, saved = Meter(learner.device, place.seconds), time.monotonic()
        batches = feed(
            learner.phase.task,
            seed=self.config.seed,
            batch_size=budget.batch,
            begin=learner.step,
            end=budget.steps,
        )
        try:
            if place.pending:
                place, evaluated = self._judged(learner, place, meter, log)
                with meter.stopped():
                    yield evaluated
            for fed in batches:
                with uninterrupted():
                    progress = self._learnt(learner, fed, meter, log)
                if progress is not None:
                    with meter.stopped():
                        yield progress
                if self._judges(learner):
                    place, evaluated = self._judged(learner, place, meter, log)
                    saved = time.monotonic()
                    with meter.stopped():
                        yield evaluated
                elif time.monotonic() - saved >= self.config.save_seconds:
                    place = self._save(learner, place, meter, log)
                    saved = time.monotonic()
        except (KeyboardInterrupt, GeneratorExit):
            self._rescue(learner, place, meter, log)
            raise

    def _rescue(self, learner: Learner, place: Place, meter: Meter, log: Log) -> None:
        """Save the steps after the last checkpoint, unless something in them is not finite."""
        is_kept = (self.place.phase, self.place.step) == (place.phase, learner.step)
        if learner.step > place.step and not is_kept:
            with contextlib.suppress(Diverged):
                self._save(learner, replace(place, pending=self._judges(learner)), meter, log)

    def _learnt(self, learner: Learner, fed: Fed, meter: Meter, log: Log) -> Progress | None:
        """One step, and the line of the log where one is due."""
        learner.learn(fed)
        meter.add(fed.tokens)
        is_last = learner.step == learner.phase.budget.steps
        is_due = learner.step % self.config.log_every == 0 or is_last
        return self._logged(learner, meter, log) if is_due else None

    def _judges(self, learner: Learner) -> bool:
        """Whether the model is judged after its last step."""
        is_last = learner.step == learner.phase.budget.steps
        return learner.step % self.config.evaluation.every == 0 or is_last

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

    def _judged(
        self, learner: Learner, place: Place, meter: Meter, log: Log
    ) -> tuple[Place, Evaluated]:
        """Judge the model, and keep the outcome with the step, both or neither."""
        learner.check()
        phase, settings = learner.phase, self.config.evaluation
        with meter.beside():
            metrics = evaluate(
                learner.judged,
                phase.task,
                "valid",
                batch_size=phase.budget.batch,
                batches=settings.batches,
                precision=self.config.precision,
            )
        with uninterrupted():
            place, event = self._evaluated(learner, place, metrics)
            log.append(asdict(event))
            return self._save(learner, place, meter, log), event

    def _evaluated(
        self, learner: Learner, place: Place, metrics: dict[str, float]
    ) -> tuple[Place, Evaluated]:
        """What the metrics change; the best model is kept."""
        phase = learner.phase
        name = judged_by(phase.task.facts)
        is_best = is_better(phase.task.facts, metrics[name], place.best)
        best = metrics[name] if is_best else place.best
        place = replace(
            place, step=learner.step, pending=False, metric=name, best=best, metrics=metrics
        )
        if is_best and phase.is_last:
            tensors = {f"model.{name}": t for name, t in weights(learner.judged).items()}
            write(self.config.out / BEST, Checkpoint(tensors, _facts(learner, place)))
        return place, Evaluated(phase.name, learner.step, metrics, is_best)

    def _save(self, learner: Learner, place: Place, meter: Meter, log: Log) -> Place:
        """Where the run stands once that is kept."""
        place = replace(place, step=learner.step, seconds=meter.seconds)
        learner.check()
        log.sync()
        write(self.config.out / LAST, Checkpoint(learner.tensors(), _facts(learner, place)))
        self.place = place
        self._status("running")
        return place

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
        notes=phase.task.notes,
    )
