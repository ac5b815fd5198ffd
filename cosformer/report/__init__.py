"""Rows to tables, figures and pages. Reads rows only: nothing here measures or knows the op."""

from cosformer.report.demo_page import TITLES, demo_page
from cosformer.report.learning import NAMES, Curves, floor_sentence, runs_figure, summary, verdict
from cosformer.report.selection import LABELS, Times, crossover_sentence, times
from cosformer.report.writing import MISSING, markdown, write_whole

__all__ = [
    "LABELS",
    "MISSING",
    "NAMES",
    "TITLES",
    "Curves",
    "Times",
    "crossover_sentence",
    "demo_page",
    "floor_sentence",
    "markdown",
    "runs_figure",
    "summary",
    "times",
    "verdict",
    "write_whole",
]
