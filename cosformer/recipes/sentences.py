"""Classes of sentences and of pairs of them: known sets, or the user's table."""

from collections.abc import Callable
from typing import Any

from cosformer.recipes.setting import RUNS, Setting, tenth
from cosformer.training import Budget, Evaluation, Optimiser, RunConfig, TaskConfig

LONG = {"imdb": 512, "amazon": 256}
"""Sets whose texts are longer than a sentence or two -> where they are cut."""


def classify(setting: Setting) -> RunConfig:
    """A table of the user's: `data` names it."""
    return _run("classify", setting)


def known(name: str) -> Callable[[Setting], RunConfig]:
    """The recipe of a set that has a name."""

    def of_set(setting: Setting) -> RunConfig:
        return _run(name, setting)

    return of_set


def _run(name: str, setting: Setting) -> RunConfig:
    # merged bytes: single ones say little to a model that is small
    options: dict[str, Any] = {"length": LONG.get(name, 128), "tokens": "bpe"}
    if setting.data is not None:
        options["data"] = setting.data
    steps = 10_000 if setting.has_gpu else 1_000
    return RunConfig(
        task=TaskConfig(name, options),
        out=RUNS / name,
        preset="mini" if setting.has_gpu else "tiny",
        model={**setting.model(name), "dropout": 0.1},
        optimiser=Optimiser(lr=1e-3, weight_decay=0.05),
        budget=Budget(steps=steps, batch=32),
        evaluation=Evaluation(every=tenth(steps), batches=40),
        precision="bfloat16" if setting.has_gpu else "float32",
    )
