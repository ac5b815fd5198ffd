"""Runs as functions that return a config; one for every task."""

from cosformer.recipes.table import RECIPES, Setting, pretrained, recipe

__all__ = ["RECIPES", "Setting", "pretrained", "recipe"]
