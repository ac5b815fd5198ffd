"""How numbers and tables are written in markdown."""

from collections.abc import Sequence

MISSING = "–"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in markdown: first column left, the others right."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
