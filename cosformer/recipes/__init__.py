"""Runs as functions that return a config; one for every task, those of a study and of a table."""

from cosformer.recipes.protocols import (
    PROBES,
    PROTOCOLS,
    ProbeProtocol,
    Protocol,
    Scale,
    TextProtocol,
)
from cosformer.recipes.reproduce import (
    ONE_BY_ONE,
    TABLES,
    UNITS,
    TableRun,
    best_of,
    check_table,
    plan,
)
from cosformer.recipes.setting import RUNS, Setting, tenth, use_of
from cosformer.recipes.study import (
    STUDIES,
    Done,
    Stage,
    Trial,
    best_rates,
    check_names,
    protocols,
    trials,
)
from cosformer.recipes.table import RECIPES, pretrained, recipe

__all__ = ["RECIPES", "Setting", "pretrained", "recipe"]
