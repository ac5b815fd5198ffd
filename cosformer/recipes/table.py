"""The recipes by the name of their task: on a CPU a run ends within minutes, a GPU does more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from cosformer.check import check_choice
from cosformer.recipes.setting import RUNS, Setting, tenth
from cosformer.tasks import KNOWN
from cosformer.training import (
    Budget,
    Evaluation,
    Objective,
    Optimiser,
    Pretraining,
    RunConfig,
    TaskConfig,
)

LENGTHS = (1024, 512, 256, 128, 64, 32, 16)
WINDOWS = 32
"""A text has at least so many windows: fewer would be learnt by heart at once."""
LONG = {"imdb": 512, "amazon": 256}
"""Known tables whose texts are longer than a sentence or two -> where they are cut."""
FEWER = [20_000, 2_000, 2_000]
"""Samples that are generated for a CPU, which would not see more in its steps."""
PROBES: dict[str, dict[str, Any]] = {
    "mqar": {"length": 128, "pairs": 8},
    "copying": {"length": 128, "copied": 8},
    "induction": {"length": 128},
}
MASKED = {"listops": 0.1, "image": 0.5, "pathfinder": 0.5}
"""Share of tokens that pre-training hides (Amos et al. 2024); 0.15 where the inputs are text."""


class Size(NamedTuple):
    """How much a run does."""

    preset: str
    steps: int
    batch: int
    lr: float
    weight_decay: float
    batches: int | None
    """Batches of an evaluation; None: the whole split."""


def language(name: str, setting: Setting) -> RunConfig:
    """The next byte of the user's text, or of what comes with Python; or masked bytes of it."""
    text = "python" if setting.data is None else setting.data
    longest = 1024 if setting.has_gpu else 256
    options = {"text": text, "length": _length(text, longest)}
    # the same text in small batches teaches more than in large ones, while cores are few
    cpu = Size("mini", 2_000, 8, 2e-3, 0.1, 20)
    return _run(name, setting, options, gpu=Size("small", 10_000, 64, 1e-3, 0.1, 20), cpu=cpu)


def sentences(name: str, setting: Setting) -> RunConfig:
    """The class of a sentence or of two: a known set, or the user's table."""
    # merged bytes: single ones say little to a model that is small
    options = {"length": LONG.get(name, 128), "tokens": "bpe", **_data(setting)}
    gpu, cpu = Size("mini", 10_000, 32, 1e-3, 0.05, 40), Size("tiny", 1_000, 32, 1e-3, 0.05, 40)
    return _run(name, setting, options, gpu=gpu, cpu=cpu, dropout=0.1)


def arena(name: str, setting: Setting) -> RunConfig:
    """Long-Range Arena, with the sizes of the small protocol (Chen et al. 2021, Skyformer).

    Two layers of width 64, two heads, 128 inside the feed-forward, mean pooling. The protocol has
    learned positions and no convolution; here both are those of the recommended model.
    """
    options: dict[str, Any] = {}
    if name in ("text", "retrieval"):
        options["length"] = 4_000 if setting.has_gpu else 1_000
    elif name in ("listops", "pathfinder") and not setting.has_gpu:
        options["sizes"] = FEWER
    gpu, cpu = Size("tiny", 20_000, 32, 1e-3, 0.05, None), Size("tiny", 500, 32, 1e-3, 0.05, 20)
    small = {"layers": 2, "width": 64, "heads": 2, "hidden": 128, "dropout": 0.1}
    return _run(name, setting, options | _data(setting), gpu=gpu, cpu=cpu, **small)


def probe(name: str, setting: Setting) -> RunConfig:
    """A probe of what linear attention finds hard: two layers, samples drawn as they are needed."""
    if setting.data is not None:
        raise ValueError(f"data must not be given for {name}, which is drawn, got {setting.data}")
    gpu, cpu = Size("mini", 10_000, 64, 2e-3, 0.1, 20), Size("tiny", 1_000, 32, 2e-3, 0.1, 20)
    found = _run(name, setting, PROBES[name], gpu=gpu, cpu=cpu, layers=2)
    return replace(found, precision="float32")


RECIPES: dict[str, Callable[[str, Setting], RunConfig]] = {
    "lm": language,
    "mlm": language,
    "classify": sentences,
    **dict.fromkeys(KNOWN, sentences),
    **dict.fromkeys(("listops", "text", "retrieval", "image", "pathfinder"), arena),
    **dict.fromkeys(PROBES, probe),
}
"""Name of a task -> what makes its run, of the name and the setting."""


def recipe(name: str, setting: Setting) -> RunConfig:
    """The run of this name."""
    check_choice("task", name, RECIPES)
    return RECIPES[name](name, setting)


def pretrained(config: RunConfig, objective: Objective) -> RunConfig:
    """The run with pre-training on its own inputs before it, for as many steps."""
    check_choice("pretrain", objective, get_args(Objective))
    before = Pretraining(
        objective=objective,
        rate=MASKED.get(config.task.name, 0.15),
        budget=config.budget,
        lr=config.optimiser.lr,
    )
    return replace(config, pretraining=before)


def _run(
    name: str, setting: Setting, options: dict[str, Any], *, gpu: Size, cpu: Size, **model: Any
) -> RunConfig:
    """The run of a task with these options and fields of the model, as large as the device."""
    size = gpu if setting.has_gpu else cpu
    return RunConfig(
        task=TaskConfig(name, options),
        out=RUNS / name,
        preset=size.preset,
        model={**setting.model(name), **model},
        optimiser=Optimiser(lr=size.lr, weight_decay=size.weight_decay),
        budget=Budget(steps=size.steps, batch=size.batch),
        evaluation=Evaluation(every=tenth(size.steps), batches=size.batches),
        precision="bfloat16" if setting.has_gpu else "float32",
    )


def _data(setting: Setting) -> dict[str, Any]:
    return {} if setting.data is None else {"data": setting.data}


def _length(text: str, longest: int) -> int:
    """The longest windows of which a file has enough; texts with a name have them."""
    if not Path(text).is_file():
        return longest
    size = Path(text).stat().st_size
    fitting = [each for each in LENGTHS if each <= longest and each * WINDOWS <= size]
    return fitting[0] if fitting else LENGTHS[-1]
