"""Rows of runs with known numbers: a study, and a published table measured anew."""

from dataclasses import replace
from pathlib import Path

import torch

from cosformer import records
from cosformer.bench import reach_rows
from cosformer.records import Run
from cosformer.report.reproduce import REPRODUCED
from cosformer.report.selection import renamed

RUN = Run(
    hardware={"device": "cuda", "name": "Test GPU"},
    versions={"torch": "2.13.0"},
    commit="0123456789ab",
    seed=None,
    date="2026-01-01T00:00:00+00:00",
)


SIZE = {"study": "lm", "scale": "full", "preset": "small", "batch": 32, "length": 1024}
SIZE |= {"text": "enwik8"}


def studied(entry, rate, value, *, seed=0, steps=1500, what="bits_per_byte", **changes):
    at = {"entry": entry, "rate": rate, "seed": seed, "steps": steps, **SIZE}
    at |= {"dtype": "bfloat16", "bin": 128}
    at |= {"first": value + 0.2, "last": value - 0.1, "tokens_per_second": 1e5, "jobs": 8}
    at |= {"mechanism": f"{entry} softmax", "by_position": [value + 0.2, value]}
    at |= {"curve": [[50, value + 1, 3.0], [100, value, 6.0]]}
    at |= {"parameters": 4_805_632, "stream_bytes": {"1024": {"a": 2**20, "conv": 2**20}}}
    return RUN.row(what, value, "bits", **(at | changes))


STUDY_ROWS = [
    studied("softmax", 1e-3, 1.7),
    studied("softmax", 3e-3, 1.6),
    studied("multiscale", 1e-3, 1.8),
    studied("multiscale", 3e-3, 1.5),
    studied("multiscale", 3e-3, 1.6, seed=1),
    studied("multiscale", 1e-3, 1.0, seed=1),  # not the best rate by the first seed
    studied("cosformer", 1e-3, 2.9),
    RUN.row("diverged", 70, "steps", entry="cosformer", rate=3e-3, seed=0, steps=1500, **SIZE),
    studied("softmax", 3e-3, 1.4, steps=7500),
    RUN.row(
        "train_speed", 123_456.0, "tokens/s", entry="softmax", rate=3e-3, seed=0, steps=200, **SIZE
    ),
]


AT = {"table": "lra", "size": "full", "start": "", "rates": [1e-3, 3e-4, 3e-3], "seeds": 1}
AT |= {"dtype": "bfloat16", "pretrain": None, "steps": 5000, "batch": 32}
LEARNT = {"length": 2000, "preset": "tiny", "floor": 0.345}
LEARNT |= {"floor_is": "the root operator", "model": {"layers": 2, "width": 64}}
LEARNT |= {"samples": {"train": 96_000, "valid": 2_000, "test": 2_000}}


def judged(entry, column, rate, valid, value, *, seed=0, **changes):
    at = {**AT, **LEARNT, "entry": entry, "column": column, "rate": rate, "seed": seed}
    at["valid_curve"] = [["training", step, {"accuracy": valid}] for step in (2500, 5000)]
    return RUN.row("accuracy", value, "accuracy", **(at | {"valid": valid} | changes))


def lost(what, entry, column, rate, reason):
    at = {**AT, "entry": entry, "column": column, "rate": rate, "seed": 0, "reason": reason}
    return RUN.row(what, 7, "steps", **at)


def cell(entry, column, valid, value, **changes):
    """A cell all of whose rates have ended; the second one is best."""
    worse = [(1e-3, valid - 0.1, value + 0.2), (3e-4, valid, value), (3e-3, valid - 0.2, 0.9)]
    return [judged(entry, column, *each, **changes) for each in worse]


TABLE_ROWS = [
    *cell("softmax", "listops", 0.5, 0.36, seeds=3),
    judged("softmax", "listops", 3e-4, 0.4, 0.38, seed=1, seeds=3),
    judged("softmax", "listops", 3e-4, 0.4, 0.40, seed=2, seeds=3),
    *(row for column in REPRODUCED["lra"].columns for row in cell("local", column, 0.5, 0.2)),
    judged("sparse", "listops", 1e-3, 0.3, 0.31),
    lost("diverged", "sparse", "listops", 3e-3, "the loss is nan"),
    lost("failed", "bigbird", "text", 1e-3, "no room (exit code 4)"),
    lost("failed", "linear", "listops", 1e-3, "tried again since"),
    *cell("linear", "listops", 0.5, 0.25, seeds=3),
]


def probed(entry, value):
    at = {"entry": entry, "probe": "mqar-64", "task": "mqar", "rate": 1e-3, "seed": 0}
    at |= {"valid": value, "length": 64, "steps": 3000, "dtype": "bfloat16"}
    return RUN.row("accuracy", value, "accuracy", **at)


def timed(candidate, length, value, *, what="speed", pass_name="training", run=RUN, **changes):
    """A row of the paper's table of speed."""
    at = {"table": "speed", "size": "full", "batch": 65_536 // length, "length": length}
    at |= {"model": {"layers": 4, "width": 256, "heads": 4, "hidden": 1024}, "dtype": "bfloat16"}
    at |= {"candidate": candidate, "pass": pass_name, "repeats": 3}
    return run.row(what, value, "", **(at | changes))


SPEED_ROWS = [
    *(timed("cosformer", n, 100.0) for n in (1_024, 4_096, 16_384)),
    *(timed("softmax", n, 100.0 * 2_048 / n) for n in (1_024, 4_096, 16_384)),
    *(timed(name, 1_024, 500.0, pass_name="inference") for name in ("cosformer", "softmax")),
    *(timed(name, 1_024, 2**30, what="peak_memory") for name in ("cosformer", "softmax")),
    timed("reformer", 1_024, 1, what="failed", reason="out of memory: no room"),
    timed("reformer", 4_096, 1, what="failed", reason="out of memory: no room"),
    timed("bigbird", 1_024, 1, what="failed", reason="tried again since"),
    timed("bigbird", 1_024, 9.0),
    RUN.row("spent", 90.0, "s", table="speed", size="full"),
]


def looked(candidate, weights):
    """What a model looks at and writes; weights `[H, T, T]`."""
    pieces = [f"w{n} " for n in range(weights.shape[-1])]
    at = {"candidate": candidate, "preset": "tiny", "length": 16, "steps": 9, "text": "manual"}
    at["valid"] = {"loss": 2.0}
    yield from reach_rows(RUN, [weights, weights.flip(0)], pieces, at)
    told = {"prompt": "Once <upon>", "written": " a time", "tokens": 4}
    held = {"64": 2**20, "1024": 2**20 if candidate != "softmax" else 2**24}
    yield RUN.row("written", 2**20, "bytes", **at, **told, stream_bytes=held)


def page_sources(ops):
    """File of results -> rows, of every kind that a page shows; `ops`: rows of the op."""
    names = {"chunked": "cosformer", "sdpa": "softmax"}
    timed = [r for r in ops if r.config.get("candidate") in names and r.what != "time_ratio"]
    factors = {"chunked": 1, "sdpa": 2}  # overtaken at 512
    mechanisms = [
        changed(row, candidate=names[name], value=factors[name] * row.value)
        for row in timed
        for name in [row.config["candidate"]]
    ]
    weights = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0)).tril()
    weights /= weights.sum(-1, keepdim=True)
    speed = {"preset": "tiny", "dtype": "float32", "compile": False, "batch": 4, "length": 64}
    return {
        "ops-cpu": ops,
        "mechanisms-cpu": mechanisms,
        "training-cpu": [
            RUN.row("train_speed", 9.0, "tokens/s", candidate=name, parameters=10, **speed)
            for name in names.values()
        ],
        "generation-cpu": [
            RUN.row(what, 2**20, "", candidate="softmax", position=64, preset="tiny", dtype="any")
            for what in ("token_time", "stream_memory")
        ],
        "study-lm": STUDY_ROWS,
        "study-probes": [probed("softmax", 0.9), probed("cosformer", 0.1)],
        "reproduce-lra": TABLE_ROWS,
        "reproduce-speed": SPEED_ROWS,
        "looking": [*looked("cosformer", weights), *looked("softmax", weights.square())],
    }


def published():
    """File of results -> rows, of all that lie in the repository."""
    files = sorted((Path(__file__).parents[2] / "results").glob("*.jsonl"))
    return {path.stem: [renamed(row) for row in records.read(path)] for path in files}


def changed(row, config=(), **changes):
    """The row with other fields, and other entries of its config for names that are no fields."""
    own = {name: changes.pop(name) for name in list(changes) if not hasattr(row, name)}
    return replace(row, config={**row.config, **dict(config), **own}, **changes)


def cells(table):
    """The lines of a table in Markdown, each as the texts of its cells."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
