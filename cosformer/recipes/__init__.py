"""Runs as functions that return a config; one for every task, and those of a study."""

from cosformer.recipes.protocols import (
    PROBES,
    PROTOCOLS,
    ProbeProtocol,
    Protocol,
    Scale,
    TextProtocol,
)
from cosformer.recipes.setting import RUNS, Setting, tenth, use_of
from cosformer.recipes.study import STUDIES, Done, Stage, Trial, check_names, protocols, trials
from cosformer.recipes.table import RECIPES, data_option, pretrained, recipe

__all__ = ["RECIPES", "Setting", "data_option", "pretrained", "recipe"]
