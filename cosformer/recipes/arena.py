"""Long-Range Arena, with the sizes of the small protocol (Chen et al. 2021, Skyformer).

Two layers of width 64, two heads, 128 inside the feed-forward, mean pooling. The protocol has
learned positions and no convolution; here both are those of the recommended model.
"""

from typing import Any

from cosformer.recipes.setting import RUNS, Setting, tenth
from cosformer.training import Budget, Evaluation, Optimiser, RunConfig, TaskConfig

SMALL = {"layers": 2, "width": 64, "heads": 2, "hidden": 128, "dropout": 0.1}
FEWER = [20_000, 2_000, 2_000]
"""Samples that are generated for a CPU, which would not see more in its steps."""


def listops(setting: Setting) -> RunConfig:
    """The value of nested operators."""
    return _run("listops", setting, {} if setting.has_gpu else {"sizes": FEWER})


def pathfinder(setting: Setting) -> RunConfig:
    """Whether a dashed path is one."""
    return _run("pathfinder", setting, {} if setting.has_gpu else {"sizes": FEWER})


def text(setting: Setting) -> RunConfig:
    """Whether a review is positive, from its bytes."""
    return _run("text", setting, {"length": 4_000 if setting.has_gpu else 1_000})


def retrieval(setting: Setting) -> RunConfig:
    """Whether one paper cites another."""
    return _run("retrieval", setting, {"length": 4_000 if setting.has_gpu else 1_000})


def image(setting: Setting) -> RunConfig:
    """The class of a grey picture."""
    return _run("image", setting, {})


def _run(name: str, setting: Setting, options: dict[str, Any]) -> RunConfig:
    if setting.data is not None:
        options = {**options, "data": setting.data}
    steps = 20_000 if setting.has_gpu else 500
    return RunConfig(
        task=TaskConfig(name, options),
        out=RUNS / name,
        preset="tiny",
        model={**setting.model(name), **SMALL},
        optimiser=Optimiser(lr=1e-3, weight_decay=0.05),
        budget=Budget(steps=steps, batch=32),
        evaluation=Evaluation(every=tenth(steps), batches=None if setting.has_gpu else 20),
        precision="bfloat16" if setting.has_gpu else "float32",
    )
