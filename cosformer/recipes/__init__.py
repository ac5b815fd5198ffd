"""Runs as functions that return a config; one for every task."""

from cosformer.recipes.setting import RUNS, Setting, tenth
from cosformer.recipes.table import RECIPES, data_option, pretrained, recipe

__all__ = ["RECIPES", "Setting", "data_option", "pretrained", "recipe"]
