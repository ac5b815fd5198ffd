"""What a run of a table is judged by, and what its row tells."""

import functools
import json
import math
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosformer.commands import crew_run
from cosformer.commands.crew_run import Judged, Work, ended_row
from cosformer.recipes import UNITS, TableRun
from cosformer.records import Row
from cosformer.tasks import LanguageTask, Task, files
from cosformer.training import LOG, Trainer, evaluate, load


def work(todo: Work[TableRun]) -> None:
    """Run to the end, in a process of its own."""
    crew_run.work(todo, row_of)


def row_of(todo: Work[TableRun]) -> Row:
    """Run to the end, and judge the checkpoint that is best on validation on the test split."""
    data = todo.data
    if data is not None and Path(data).is_dir():
        # not an option of the task: the run goes on where the folder has another place
        os.environ[files.VARIABLE] = data
        data = None
    return ended_row(replace(todo, data=data), described(todo), functools.partial(_judged, todo))


def described(todo: Work[TableRun]) -> dict[str, Any]:
    """What the run is, as the config of its row has it, whatever comes of it."""
    how: dict[str, Any] = {"graph": todo.graph, "compile": todo.compile, "jobs": todo.jobs}
    if todo.data is not None and Path(todo.data).is_file():
        how["text"] = "another"
    return {**todo.trial.described(), **how}


def _judged(todo: Work[TableRun], run: Trainer) -> Judged:
    metric, config, task = todo.trial.protocol.metric, run.config, run.result.task
    best = load(config.out, "best", device=str(task.device))
    found = evaluate(
        best.model,
        task,
        "test",
        batch_size=config.budget.batch,
        batches=config.evaluation.batches,
        precision=config.precision,
    )
    lines = [json.loads(line) for line in (config.out / LOG).read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if "loss" in line]
    told = {
        "model": dict(config.model),
        "preset": config.preset,
        "length": task.facts.length,
        "samples": dict(task.sizes),
        "valid": best.place.metrics[metric],
        "best_step": best.place.step,
        "floor": _floor(task, metric),
        "floor_is": task.facts.floor_is,
        "test": found,
        "tokens_per_second": statistics.median(speeds),
        "seconds": run.result.place.seconds,
        "valid_curve": [
            [line["phase"], line["step"], line["metrics"]] for line in lines if "metrics" in line
        ],
    }
    return Judged(metric, found[metric], UNITS[metric], told)


def _floor(task: Task, metric: str) -> float:
    """What a simple guess reaches on the test split, by the metric."""
    floor = task.facts.floor
    if metric == "perplexity":
        return math.exp(floor)
    if metric == "bits_per_byte":
        assert isinstance(task, LanguageTask)
        width = task.bytes_per_token["test"]
        assert width is not None
        return floor / math.log(2) / width
    return floor
