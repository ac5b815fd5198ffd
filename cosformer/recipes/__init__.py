"""Runs as functions that return a config; one for every task."""

from cosformer.recipes.setting import Setting
from cosformer.recipes.table import RECIPES, pretrained, recipe

__all__ = ["RECIPES", "Setting", "pretrained", "recipe"]
