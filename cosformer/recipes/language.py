"""Language models, on the user's text or on what comes with Python."""

from pathlib import Path
from typing import Any

from cosformer.recipes.setting import RUNS, Setting, tenth
from cosformer.training import Budget, Evaluation, Optimiser, RunConfig, TaskConfig

LENGTHS = (1024, 512, 256, 128, 64, 32, 16)
WINDOWS = 32
"""A text has at least so many windows: fewer would be learnt by heart at once."""


def lm(setting: Setting) -> RunConfig:
    """The next byte: a model that a CPU trains in minutes, a GPU a larger one."""
    return _run("lm", setting)


def mlm(setting: Setting) -> RunConfig:
    """Masked bytes of the same text."""
    return _run("mlm", setting)


def _run(name: str, setting: Setting) -> RunConfig:
    text = "python" if setting.data is None else setting.data
    options: dict[str, Any] = {"text": text, "length": _length(text, longest=_longest(setting))}
    if setting.has_gpu:
        preset, budget, rate = "small", Budget(steps=10_000, batch=64), 1e-3
    else:
        # the same text in small batches teaches more than in large ones, while cores are few
        preset, budget, rate = "mini", Budget(steps=2_000, batch=8), 2e-3
    return RunConfig(
        task=TaskConfig(name, options),
        out=RUNS / name,
        preset=preset,
        model=setting.model(name),
        optimiser=Optimiser(lr=rate, weight_decay=0.1),
        budget=budget,
        evaluation=Evaluation(every=tenth(budget.steps), batches=20),
        precision="bfloat16" if setting.has_gpu else "float32",
    )


def _longest(setting: Setting) -> int:
    return 1024 if setting.has_gpu else 256


def _length(text: str, *, longest: int) -> int:
    """The longest windows of which a file has enough; texts with a name have them."""
    if not Path(text).is_file():
        return longest
    size = Path(text).stat().st_size
    fitting = [each for each in LENGTHS if each <= longest and each * WINDOWS <= size]
    return fitting[0] if fitting else LENGTHS[-1]
