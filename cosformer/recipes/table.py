"""The recipes by the name of their task."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from cosformer.check import check_choice
from cosformer.recipes import arena, language, probes, sentences
from cosformer.recipes.setting import Setting
from cosformer.tasks import KNOWN
from cosformer.training import Objective, Pretraining, RunConfig

RECIPES: dict[str, Callable[[Setting], RunConfig]] = {
    "lm": language.lm,
    "mlm": language.mlm,
    "classify": sentences.classify,
    **{name: sentences.known(name) for name in KNOWN},
    "listops": arena.listops,
    "text": arena.text,
    "retrieval": arena.retrieval,
    "image": arena.image,
    "pathfinder": arena.pathfinder,
    "mqar": probes.mqar,
    "copying": probes.copying,
    "induction": probes.induction,
}
"""Name of a task -> what makes its run. A line a recipe."""

MASKED = {"listops": 0.1, "image": 0.5, "pathfinder": 0.5}
"""Share of tokens that pre-training hides (Amos et al. 2024); 0.15 where the inputs are text."""


def recipe(name: str, setting: Setting) -> RunConfig:
    """The run of this name."""
    check_choice("task", name, RECIPES)
    return RECIPES[name](setting)


def data_option(name: str) -> str:
    """The option of a task that the user's data (`Setting.data`) is."""
    return "text" if name in ("lm", "mlm") else "data"


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
