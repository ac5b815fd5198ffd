"""What a run of a study is judged by, and what its row tells."""

import dataclasses
import functools
import json
import math
import statistics
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from cosformer.commands import crew_run
from cosformer.commands.crew_run import Judged, Work, ended_row
from cosformer.models import LanguageModel
from cosformer.recipes import STUDIES, ProbeProtocol, TextProtocol, Trial
from cosformer.records import Row
from cosformer.tasks import LanguageTask, Task
from cosformer.training import LOG, RunConfig, Trainer, evaluate, losses_by_position

SPEED = "train_speed"
"""The quantity of a run that was timed."""
Found = TypeVar("Found")
REMEMBERED = 65_536
"""Tokens after which the state of a stream is told, beside the length of the protocol."""


def work(todo: Work[Trial]) -> None:
    """Run a trial to its end, in a process of its own."""
    crew_run.work(todo, row_of)


def row_of(todo: Work[Trial]) -> Row:
    """Run a trial to its end; judge what it has learnt, unless it is timed."""
    return ended_row(todo, _described(todo), functools.partial(_judged, todo))


def _judged(todo: Work[Trial], run: Trainer) -> Judged:
    trial, model, told = todo.trial, run.result.model, _learnt(todo)
    if trial.is_timed:
        return Judged(SPEED, told["tokens_per_second"], "tokens/s", told)
    if isinstance(model, LanguageModel):
        lengths = (trial.protocol.length, REMEMBERED)
        told["stream_bytes"] = {str(n): model.stream_memory(n) for n in lengths}
    p, study = trial.protocol, STUDIES[trial.study]
    if isinstance(p, ProbeProtocol):
        value, more = _judged_by_answers(run, p)
    else:
        assert isinstance(p, TextProtocol)
        value, more = _judged_by_losses(run, p)
    return Judged(study.what, value, study.unit, told | more)


def _described(todo: Work[Trial]) -> dict[str, Any]:
    """What the trial is, as a row's config has it."""
    trial, p = todo.trial, todo.trial.protocol
    return {
        **dataclasses.asdict(trial),
        "mechanism": trial.fields["mechanism"],
        "model": {**p.model, **trial.fields},
        "preset": p.preset,
        "batch": p.batch,
        "length": p.length,
        "dtype": "bfloat16" if p.bfloat16 else "float32",
        "graph": todo.graph,
        "compile": todo.compile is None and todo.device != "cpu",
        "jobs": todo.jobs,
        **_data(todo),
    }


def _data(todo: Work[Trial]) -> dict[str, Any]:
    """The fields of a row that say what data the run learns from."""
    p = todo.trial.protocol
    if isinstance(p, ProbeProtocol):
        return {"task": p.name, "options": dict(p.options)}
    assert isinstance(p, TextProtocol)
    is_known = todo.data is None or Path(todo.data).is_dir()
    return {"text": p.text if is_known else "another", "held_out": p.held_out}


def _judged_by_answers(run: Trainer, p: ProbeProtocol) -> tuple[float, dict[str, Any]]:
    """The share of right answers on the test split, and what else the row tells.

    `valid`: the same on validation; `by_length`: length -> the same on test, where a probe has
    further lengths, as `_beyond` returns it.
    """
    config, result, task = run.config, run.result, run.result.task

    def accuracy(task: Task, length: int, samples: int) -> float:
        batch = max(1, p.batch * p.length // length)  # as many tokens as a step of training has
        return evaluate(
            result.model,
            task,
            "test",
            batch_size=batch,
            batches=math.ceil(samples / batch),
            precision=config.precision,
        )["accuracy"]

    def at(length: int) -> float:
        longer = replace(config.task, options={**p.options, "test_length": length})
        return accuracy(longer.create(str(task.device)), length, p.far_samples)

    value = accuracy(task, p.length, task.sizes["test"])
    told: dict[str, Any] = {"valid": result.place.metrics["accuracy"]}
    if p.far:
        told["by_length"] = {str(p.length): value}
    for length in p.far:
        told["by_length"][str(length)] = _beyond(result.model, length, at, told)
    return value, told


def _judged_by_losses(run: Trainer, p: TextProtocol) -> tuple[float, dict[str, Any]]:
    """Bits a label on the whole validation split, and what else the row tells.

    The same by position, and for the next byte `far`: the same in longer sequences, a number for
    each length of training, as `_beyond` returns it.
    """
    config, result, task = run.config, run.result, run.result.task
    losses, labels = losses_by_position(
        result.model, task, "valid", batch_size=p.batch, precision=config.precision
    )
    value = _bits(losses, labels)
    assert value is not None
    told = _by_position(losses, labels, p)
    if isinstance(task, LanguageTask):
        at = functools.partial(_far, result.model, task, config, p)
        told["far"] = _beyond(result.model, p.far * p.length, at, told)
    return value, told


def _far(
    model: nn.Module, task: LanguageTask, config: RunConfig, p: TextProtocol, length: int
) -> list[float | None]:
    """Bits a byte in sequences of a length, a number for each length of training."""
    losses, labels = losses_by_position(
        model,
        task.with_length(length),
        "valid",
        batch_size=1,
        batches=max(1, p.far_bytes // length),
        precision=config.precision,
    )
    if not losses.isfinite().all():  # a row has numbers alone
        raise ValueError("losses must be finite, got others")
    bins = zip(losses.split(p.length), labels.split(p.length), strict=True)
    return [_bits(*each) for each in bins]


def _beyond(
    model: nn.Module, length: int, judge: Callable[[int], Found], told: dict[str, Any]
) -> Found | None:
    """What a finished model is judged at a length beyond that of training.

    None: the model has a limit below that length, or it failed there. The failure does not cost
    the row: its reason goes into `told`, as `far_failed`.
    """
    assert isinstance(model, LanguageModel)
    if model.backbone.limit is not None and model.backbone.limit < length:
        return None
    try:
        return judge(length)
    except (RuntimeError, ValueError) as error:
        traceback.print_exc()
        told["far_failed"] = f"{length} tokens: {error}"
        return None


def _bits(losses: Tensor, labels: Tensor) -> float | None:
    """Bits a label; None where nothing is asked."""
    count = float(labels.sum())
    return float(losses.sum()) / count / math.log(2) if count else None


def _by_position(losses: Tensor, labels: Tensor, p: TextProtocol) -> dict[str, Any]:
    bins = zip(losses.split(p.bin), labels.split(p.bin), strict=True)
    return {
        "bin": p.bin,
        "by_position": [_bits(*each) for each in bins],
        "first": _bits(losses[: p.bin], labels[: p.bin]),
        "last": _bits(losses[-2 * p.bin :], labels[-2 * p.bin :]),
    }


def _learnt(todo: Work[Trial]) -> dict[str, Any]:
    """Speed and curves, from the log of the run.

    `curve`: step, mean loss in bits and seconds of training up to there, without evaluations;
    `valid_curve`: step and loss in bits on validation.
    """
    lines = [json.loads(line) for line in (todo.out / LOG).read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    speeds = [line["tokens_per_second"] for line in steps]
    p, seconds, before, curve = todo.trial.protocol, 0.0, 0, []
    for line in steps:
        tokens = (line["step"] - before) * p.batch * p.length
        before, seconds = line["step"], seconds + tokens / line["tokens_per_second"]
        curve.append([before, round(line["loss"] / math.log(2), 4), round(seconds, 2)])
    judged = [line for line in lines if "metrics" in line]
    return {
        "tokens_per_second": statistics.median(speeds),
        "train_seconds": seconds,
        "curve": curve,
        "valid_curve": [[j["step"], j["metrics"]["loss"] / math.log(2)] for j in judged],
    }
