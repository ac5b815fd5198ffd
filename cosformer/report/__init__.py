"""Rows to tables, figures and pages. Reads rows only: nothing here measures or knows the op."""

from cosformer.report.learning import (
    NAMES,
    Curves,
    floor_sentence,
    runs_figure,
    summary,
    verdict,
)
from cosformer.report.maps import Maps
from cosformer.report.page import TITLES, Shown, page
from cosformer.report.selection import LABELS, Times, crossover_sentence, times
from cosformer.report.writing import MISSING, markdown, write_whole

__all__ = [
    "LABELS",
    "MISSING",
    "NAMES",
    "TITLES",
    "Curves",
    "Maps",
    "Shown",
    "Times",
    "crossover_sentence",
    "floor_sentence",
    "markdown",
    "page",
    "runs_figure",
    "summary",
    "times",
    "verdict",
    "write_whole",
]
