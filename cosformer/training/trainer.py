"""The loop: steps, log, evaluations and checkpoints of all phases, from where a run stands."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from cosformer.check import NotANumber
from cosformer.config import plain
from cosformer.models import parameter_count
from cosformer.tasks import Task
from cosformer.training.board import boards
from cosformer.training.checkpoints import Checkpoint, Saver, read
from cosformer.training.config import RunConfig
from cosformer.training.device import resolved
from cosformer.training.evaluation import evaluate, is_better, judged_by
from cosformer.training.feed import Fed, feed
from cosformer.training.fingerprint import keep, require_same
from cosformer.training.folder import (
    BEST,
    DATA,
    LAST,
    LOG,
    STATUS,
    Log,
    adopt,
    comparable,
    going_on,
    is_same_run,
    locked,
    require_visible,
    write_json,
)
from cosformer.training.interrupt import uninterrupted
from cosformer.training.learner import Diverged, Learner
from cosformer.training.loading import create_task, keep_names, keep_vocabulary, model_of
from cosformer.training.phases import Phase, phases
from cosformer.training.place import Place, place_of
from cosformer.training.plugin import load_plugin
from cosformer.training.possible import notes_on_sharing, require_possible, require_shared
from cosformer.training.processes import ALONE, Lost, Processes, joined
from cosformer.training.progress import Evaluated, Event, Meter, Progress, Started
from cosformer.training.start import beginning, require_fit

COMPILES = "torch.compile makes faster steps of the blocks; for that the first step takes longer"


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    place: Place
    model: nn.Module
    """The model after the last step; the moving average where there is one. Of processes that share
    its parameters each has its shard of them, as FSDP leaves it."""
    task: Task


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

    def __init__(
        self, config: RunConfig, task: Task | None = None, processes: Processes | None = None
    ) -> None:
        """A run that has not begun.

        Args:
            config: what the run does.
            task: the task of the config, if it exists already, as for several runs on one task.
            processes: those that train the run, as `joined` returns them, if they have met already.
        """
        import safetensors  # noqa: F401  # if it is missing, say so before the work

        if not isinstance(config, RunConfig):
            raise TypeError(f"config must be a RunConfig, got {type(config).__name__}")
        if config.plugin is not None:
            load_plugin(config.plugin)
            config = replace(config, plugin=config.plugin.resolve())
        config = going_on(config)
        self.config, self.device, self._task = config, resolved(config.device), task
        if config.graph and torch.device(self.device).type != "cuda":
            raise ValueError(f"graph must be false on {self.device}, which has none, got True")
        self._boards = boards(config)
        self._given, self._processes = processes, processes or ALONE
        self._log: Log | None = None  # of the first process alone
        self._moment = "the start"  # where the run is, for a message about a process that fails
        self.place = Place()
        """Where the run stood at its last checkpoint; status.json says the same."""

    def events(self) -> Generator[Event, None, None]:
        """Train, telling of every line of the log, on every process if there are several."""
        given = None if self._given is None else contextlib.nullcontext(self._given)
        with (
            given or joined(self.config.parallel, self.device) as self._processes,
            self._processes.guarded(lambda: self._moment),
        ):
            yield from self._events(self._processes)

    def _events(self, processes: Processes) -> Iterator[Event]:
        """Train with these processes; the first alone writes files, but for shared tensors."""
        out = self.config.out
        self._saver = Saver(processes)
        start = beginning(self.config)
        known = out if start is None else start.folder
        task = self._task or create_task(self.config, known, self.device)
        todo = phases(self.config, task)
        if start is not None:
            require_fit(todo[0], start)
        if not is_same_run(self.config):  # another's folder is refused before a lock is in it
            require_possible(todo)
        require_shared(todo, self.config, processes)
        processes.require_same("settings", comparable(plain(self.config)))
        with contextlib.ExitStack() as closed:
            if processes.is_first:
                closed.enter_context(locked(out))
                has_data = (out / DATA).exists()
                if has_data:
                    require_same(out, task)  # before the folder says that it is a longer run
                adopt(self.config)
                if not has_data:
                    keep(out, task)
            processes.wait()
            require_visible(out)
            found = self._found()
            if found is not None:
                self._require_model(found, todo[self.place.phase])
            processes.require_same(f"the checkpoint in {out}", asdict(self.place))
            if processes.is_first:
                if task.vocabulary is not None:
                    keep_vocabulary(out, task.vocabulary)
                if task.names is not None:
                    keep_names(out, task.names)
                names = [phase.name for phase in todo]
                lines = Log(out / LOG, lambda row: self._is_done(row, names))
                self._log = closed.enter_context(lines)
                for board in self._boards:
                    closed.callback(board.close)
            else:
                require_same(out, task)  # another machine may have other data
            self._status("running")
            closed.callback(self._saver.settle)
            try:
                before = None if start is None else start.model
                with processes.guarded(lambda: self._moment):
                    for event in self._phases(todo, found, before):
                        for board in self._boards if processes.is_first else ():
                            board.add(event)
                        yield event
            except Exception as error:
                self._saver.settle(is_left=isinstance(error, Lost))
                with contextlib.suppress(OSError):  # the disk may be full: the first error says so
                    self._status("failed", str(error))
                raise
            self._status("finished")
            processes.wait()

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
        self, todo: list[Phase], found: Checkpoint | None, before: nn.Module | None
    ) -> Iterator[Event]:
        """From the checkpoint that was found, else from the model `before`, else from nothing."""
        for number in range(self.place.phase, len(todo)):
            learner = Learner(self.config, todo[number], number, self._processes)
            place = self.place
            if found is not None:
                learner.restore(found, place.step, str(self.config.out / LAST))
                found = None
            else:
                place = replace(place, phase=number, step=0, metric=None, best=None, metrics={})
                if before is not None:
                    learner.begin_from(before)
            yield _started(learner)
            with self._processes.listening():
                yield from self._steps(learner, place)
            before = learner.judged
        assert before is not None
        self._processes.release(before)
        self.result = Result(self.place, before, todo[-1].task)

    def _steps(self, learner: Learner, place: Place) -> Iterator[Event]:
        """All steps of a phase; an interrupt loses none, nor does a reader that stops reading."""
        budget = learner.phase.budget
        self._meter, saved = Meter(learner.device, place.seconds), time.monotonic()
        batches = feed(
            learner.phase.task,
            seed=self.config.seed,
            batch_size=budget.batch,
            begin=learner.step,
            end=budget.steps,
            part=self._processes.part,
        )
        try:
            if place.pending:
                place, evaluated = self._judged(learner, place)
                with self._meter.stopped():
                    yield evaluated
            for fed in batches:
                self._saver.check()
                self._moment = f"step {learner.step + 1} of {learner.phase.name}"
                with uninterrupted():
                    progress = self._learnt(learner, fed)
                if progress is not None:
                    with self._meter.stopped():
                        yield progress
                if self._judges(learner):
                    place, evaluated = self._judged(learner, place)
                    saved = time.monotonic()
                    with self._meter.stopped():
                        yield evaluated
                elif self._processes.agreed(time.monotonic() - saved >= self.config.save_seconds):
                    place = self._save(learner, place)
                    saved = time.monotonic()
            self._saver.wait()
        except NotANumber as error:  # a mechanism refused what the model made of its weights
            raise Diverged(f"{self._moment}: the model has diverged: {error}") from None
        except (KeyboardInterrupt, GeneratorExit) as error:
            # of many processes all are interrupted together, and a reader leaves only one
            if self._processes.count == 1 or isinstance(error, KeyboardInterrupt):
                self._rescue(learner, place)
            raise

    def _rescue(self, learner: Learner, place: Place) -> None:
        """Save the steps after the last checkpoint, unless something in them is not finite."""
        with uninterrupted():
            self._saver.wait()
            is_kept = (self.place.phase, self.place.step) == (place.phase, learner.step)
            if learner.step > place.step and not is_kept:
                with contextlib.suppress(Diverged):
                    self._save(learner, replace(place, pending=self._judges(learner)))
                    self._saver.wait()

    def _learnt(self, learner: Learner, fed: Fed) -> Progress | None:
        """One step, and the line of the log where one is due."""
        learner.learn(fed)
        self._meter.add(fed.tokens)
        if learner.phase.unlogged(learner.step, self.config.log_every):
            return None
        loss, norm = learner.read()
        speed, seconds = self._meter.read()
        event = Progress(
            phase=learner.phase.name,
            step=learner.step,
            steps=learner.phase.end(learner.step),
            loss=loss,
            lr=learner.lr,
            gradient_norm=norm,
            tokens_per_second=speed,
            memory=self._meter.memory(),
            seconds_left=seconds * (learner.phase.budget.steps - learner.step),
        )
        if self._log is not None:
            self._log.append(asdict(event))
        return event

    def _judges(self, learner: Learner) -> bool:
        """Whether the model is judged after its last step."""
        is_end = learner.step in learner.phase.ends
        return learner.step % self.config.evaluation.every == 0 or is_end

    def _judged(self, learner: Learner, place: Place) -> tuple[Place, Evaluated]:
        """Judge the model, and keep the outcome with the step, both or neither."""
        learner.check()
        phase, facts = learner.phase, learner.phase.task.facts
        with self._meter.beside():
            metrics = evaluate(
                learner.judged,
                phase.task,
                "valid",
                batch_size=phase.budget.batch,
                batches=self.config.evaluation.batches,
                precision=self.config.precision,
                processes=self._processes,
            )
        if not math.isfinite(metrics["loss"]):
            raise Diverged(f"step {learner.step} of {phase.name}: loss on validation not finite")
        name = judged_by(facts)
        event = Evaluated(
            phase.name, learner.step, metrics, best=is_better(facts, metrics[name], place.best)
        )
        best = metrics[name] if event.best else place.best
        place = replace(place, pending=False, metric=name, best=best, metrics=metrics)
        with uninterrupted():
            if self._log is not None:
                self._log.append(asdict(event))
            return self._save(learner, place, is_best=event.best and phase.is_last), event

    def _save(self, learner: Learner, place: Place, *, is_best: bool = False) -> Place:
        """Begin to write the checkpoint of this step, and of the best if it is that; its place."""
        place = replace(place, step=learner.step, seconds=self._meter.seconds)
        learner.check()
        if self._log is not None:
            self._log.sync()
        self._saver.wait()  # two copies at a time would take memory
        facts = {"place": asdict(place), "model": plain(learner.phase.model)}
        last = Checkpoint(self._saver.copied(learner.tensors()), facts)
        files = {self.config.out / LAST: last}
        if is_best:
            judged = last.part("average") or last.part("model")
            named = {f"model.{name}": tensor for name, tensor in judged.items()}
            files = {self.config.out / BEST: Checkpoint(named, facts), **files}
        self._saver.begin(files, lambda: self._kept(place))
        return place

    def _kept(self, place: Place) -> None:
        """Say that the checkpoint of this place is written."""
        self.place = place
        self._status("running")

    def _status(self, state: str, message: str | None = None) -> None:
        if not self._processes.is_first:
            return
        status = {"state": state, **asdict(self.place), "message": message}
        write_json(self.config.out / STATUS, status)


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
        notes=(
            *phase.task.notes,
            *([COMPILES] if learner.compiled is not None else []),
            *notes_on_sharing(phase, learner.processes),
        ),
        mesh=learner.processes.sizes,
    )
