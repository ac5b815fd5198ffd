"""`cosformer evaluate RUN`: what a trained model is worth, on the screen and as a file."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cosformer import records
from cosformer.check import check_whole
from cosformer.config import plain
from cosformer.models import LanguageModel
from cosformer.training import (
    Loaded,
    Lost,
    Parallel,
    Processes,
    evaluate,
    joined,
    judged_by,
    load,
    number,
    phases,
    require_stretches,
    resolved,
    shown,
    write_json,
)

POSITIONAL = "run"
FAR = 10**6
"""Tokens after which a window is full, and only what keeps all of them still grows."""


@dataclass(frozen=True)
class Options:
    """Judge a trained model on one split of its task; metrics-SPLIT-CHECKPOINT.json keeps them.

    cosformer evaluate runs/my-run --split valid

    torchrun --nproc-per-node=8 -m cosformer evaluate runs/my-run --shard 8
    """

    run: Path
    """Folder of the run."""
    checkpoint: Literal["best", "last"] = "best"
    """The weights that were best on validation, or the last ones."""
    split: Literal["train", "valid", "test"] = "test"
    """Part of the data."""
    batches: int | None = None
    """Number of batches, spread evenly over the split; the whole split if not given."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes a GPU where there is one."""
    plugin: Path | None = None
    """Python file that registers the run's mechanism; the one of the run's config if not given."""
    data: str | None = None
    """Where the run's data are now, if they have moved; the same data, or there is an error."""
    rows: Path | None = None
    """File that the metrics are added to as rows, as results/learning-cuda.jsonl."""
    shard: int = 1
    """Number of torchrun's processes that share the parameters of the model."""
    context: int = 1
    """Number of torchrun's processes that each take one stretch of every sequence. There are
    --shard times --context processes for a row; where there are more, they divide the rows."""

    def __post_init__(self) -> None:
        for name in ("shard", "context", "batches"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)


def run(options: Options) -> int:
    if options.rows is not None:
        records.require_rows(options.rows, "rows")
    parallel = Parallel(shard=options.shard, context=options.context)
    try:
        with (
            joined(parallel, resolved(options.device)) as processes,
            processes.guarded(lambda: f"judging {options.run}"),
            shown(is_first=processes.is_first),
        ):
            return _judge(options, processes)
    except Lost as error:
        print(f"cosformer: evaluate: {error}", file=sys.stderr)
        return 1


def _judge(options: Options, processes: Processes) -> int:
    """Judge the model in one of the processes that share every batch."""
    device = resolved(options.device)
    # shards go to a GPU that need not have room for all of the model
    at_first = "cpu" if options.shard > 1 else device
    found = load(
        options.run, options.checkpoint, device=at_first, plugin=options.plugin, data=options.data
    )
    found = replace(found, device=device)
    facts = found.task.facts
    if options.context > 1:
        require_stretches(phases(found.config, found.task)[-1], options.context)
    metrics = evaluate(
        processes.sharded(found.model, found.config.precision),
        found.task,
        options.split,
        batch_size=found.config.budget.batch,
        batches=options.batches,
        precision=found.config.precision,
        processes=processes,
    )
    if not processes.is_first:
        return 0
    print(f"{options.run}: {options.checkpoint} checkpoint, step {found.place.step:,}")
    for name, value in metrics.items():
        print(f"  {options.split} {name:<14} {number(value)}")
    print(f"  to beat: {judged_by(facts)} {facts.floor:.4f} ({facts.floor_is})")
    if isinstance(found.model, LanguageModel) and found.model.backbone.streams:
        print(f"  a stream remembers {stream_memory(found.model, facts.length)}")
    _keep(found, options, metrics)
    if options.rows is not None:
        records.append(options.rows, _rows(found, options, metrics))
        print(f"rows added to {options.rows}")
    return 0


def stream_memory(model: LanguageModel, length: int) -> str:
    """Bytes of a stream after so many tokens, and by how much each later token adds to them."""
    after = model.stream_memory(length)
    parts = ", ".join(f"{name} {size:,}" for name, size in after.items())
    told = f"{sum(after.values()):,} bytes after {length:,} tokens ({parts})"
    limit = model.backbone.limit
    if limit is not None:
        return f"{told}; {limit:,} tokens are the most ({model.backbone.limited_by})"
    far, further = (sum(model.stream_memory(n).values()) for n in (FAR, FAR + 1))
    if far == further:
        full = "as many" if far == sum(after.values()) else f"{far:,}"
        return f"{told}, and {full} after any number of them"
    return f"{told}, and {further - far:,} more with every later one"


def _keep(found: Loaded, options: Options, metrics: dict[str, float]) -> None:
    """The metrics as a file of the run; a run that cannot be written to is judged all the same."""
    path = options.run / f"metrics-{options.split}-{options.checkpoint}.json"
    content = {
        "split": options.split,
        "samples": _samples(found, options),
        "checkpoint": options.checkpoint,
        "batches": options.batches,
        "step": found.place.step,
        "metrics": metrics,
        "floor": found.task.facts.floor,
    }
    try:
        write_json(path, content)
    except OSError as error:
        print(f"cosformer: evaluate: not written: {error}", file=sys.stderr)
    else:
        print(f"written: {path}")


def _samples(found: Loaded, options: Options) -> int:
    """Number of samples that the model was judged by."""
    size, batch = found.task.sizes[options.split], found.config.budget.batch
    return size if options.batches is None else min(size, options.batches * batch)


def _rows(found: Loaded, options: Options, metrics: dict[str, float]) -> list[records.Row]:
    """The metrics beside what they have to beat."""
    config, facts = found.config, found.task.facts
    this = records.Run.begin(device=found.device.split(":")[0], seed=config.seed)
    at = {
        "task": config.task.name,
        "options": {name: _public(value) for name, value in config.task.options.items()},
        "mechanism": found.model.config.mechanism,
        "preset": config.preset,
        "model": dict(config.model),
        "start": None if config.start is None else config.start.name,
        "pretraining": plain(config.pretraining),
        "optimiser": plain(config.optimiser),
        "schedule": plain(config.schedule),
        "steps": found.place.step,
        "budget": plain(config.budget),
        **({"extended": list(config.extended)} if config.extended else {}),
        "batch": config.budget.batch,
        "split": options.split,
        "samples": _samples(found, options),
        "split_size": found.task.sizes[options.split],
        "graph": config.graph,
        "seconds": found.place.seconds,
        "checkpoint": options.checkpoint,
        "precision": config.precision,
    }
    floor = this.row("floor", facts.floor, judged_by(facts), by=facts.floor_is, **at)
    return [this.row(name, value, name, **at) for name, value in metrics.items()] + [floor]


def _public(value: Any) -> Any:
    """An option as others may read it: of a path the name, not where the user keeps it."""
    is_path = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_path else value
