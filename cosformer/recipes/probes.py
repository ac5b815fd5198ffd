"""Probes of what linear attention finds hard: two layers, samples drawn as they are needed."""

from cosformer.recipes.setting import RUNS, Setting, tenth
from cosformer.training import Budget, Evaluation, Optimiser, RunConfig, TaskConfig


def mqar(setting: Setting) -> RunConfig:
    """Which value stood beside a key."""
    return _run("mqar", setting, length=128, pairs=8)


def copying(setting: Setting) -> RunConfig:
    """Tokens among blanks, to be said again."""
    return _run("copying", setting, length=128, copied=8)


def induction(setting: Setting) -> RunConfig:
    """What followed the special token."""
    return _run("induction", setting, length=128)


def _run(name: str, setting: Setting, **options: int) -> RunConfig:
    if setting.data is not None:
        raise ValueError(f"data must not be given for {name}, which is drawn, got {setting.data}")
    steps = 10_000 if setting.has_gpu else 1_000
    return RunConfig(
        task=TaskConfig(name, options),
        out=RUNS / name,
        preset="mini" if setting.has_gpu else "tiny",
        model={**setting.model(name), "layers": 2},
        optimiser=Optimiser(lr=2e-3, weight_decay=0.1),
        budget=Budget(steps=steps, batch=64 if setting.has_gpu else 32),
        evaluation=Evaluation(every=tenth(steps), batches=20),
    )
