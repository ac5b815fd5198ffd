"""Small runs, and what is compared of two of them."""

import json

import torch

from cosformer import training
from cosformer.training import checkpoints, evaluation

TIMES = ("tokens_per_second", "memory", "seconds_left")
"""What differs from one run of the same config to the next."""


def config(out, **changes):
    """Copying with dropout and a moving average: all that a state consists of."""
    task = training.TaskConfig("copying", {"length": 12, "copied": 3, "vocabulary": 4})
    given = {"model": {"layers": 1, "width": 16, "heads": 2, "dropout": 0.1}, "average": 0.9}
    given |= {"optimiser": training.Optimiser(lr=1e-2), "schedule": training.Schedule(warmup=0.2)}
    given |= {"budget": training.Budget(steps=24, batch=8), "device": "cpu", "log_every": 3}
    given |= {"evaluation": training.Evaluation(every=8, batches=2)}
    return training.RunConfig(task, out, **(given | changes))


def table(folder, lines, length):
    """Classify these texts, each after its label."""
    (folder / "own.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")
    return training.TaskConfig("classify", {"data": str(folder / "own.tsv"), "length": length})


def pretraining():
    return training.Pretraining("causal", budget=training.Budget(steps=10, batch=4), lr=1e-2)


def log(out):
    """The lines of a log without times; every one must be whole."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def tensors(path):
    return dict(checkpoints.read(path).tensors)


def assert_same_outcome(one, other):
    """Logs line by line, checkpoints bit for bit."""
    assert log(one) == log(other)
    for name in ("last.safetensors", "best.safetensors"):
        left, right = tensors(one / name), tensors(other / name)
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), f"{name}: {key}"


def poison(monkeypatch, where, step):
    """NaN into the loss, or into the gradient of one norm, after so many steps."""
    normal, calls = evaluation.summed_loss, iter(range(10**6))

    def poisoned(model, batch, asked=None):
        loss = normal(model, batch, asked)
        if next(calls) < step:
            return loss
        if where == "loss":
            return loss * float("nan")
        nothing = 0 * model.get_submodule("backbone").norm.weight.sum()
        nothing.register_hook(lambda gradient: gradient * float("nan"))
        return loss + nothing

    monkeypatch.setattr(evaluation, "summed_loss", poisoned)
