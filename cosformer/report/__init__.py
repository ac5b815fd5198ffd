"""Rows to tables, figures and pages. Reads rows only: nothing here measures or knows the op."""

from cosformer.report.learning import summary
from cosformer.report.page import TITLES, page
from cosformer.report.selection import LABELS, Times, crossover_sentence, times
from cosformer.report.writing import MISSING, markdown, write_whole

__all__ = [
    "LABELS",
    "MISSING",
    "TITLES",
    "Times",
    "crossover_sentence",
    "markdown",
    "page",
    "summary",
    "times",
    "write_whole",
]
