"""How numbers, tables and files are written."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cosformer.records import Row

MISSING = "–"


class Cell(NamedTuple):
    """What stands in one place of a table."""

    text: str
    rows: Sequence[Row] = ()
    """The rows that the text is made of."""
    why: str = ""
    """Why there is no number; empty where there is one, or where nothing was measured."""


class Grid(NamedTuple):
    """A table before it is written as markdown or HTML."""

    header: Sequence[str]
    lines: Sequence[Sequence[Cell]]
    title: str = ""
    """What stands in it, in one line."""


def words(*texts: str) -> list[Cell]:
    """Cells that no rows are behind."""
    return [Cell(text) for text in texts]


def markdown(header: Sequence[str], lines: Sequence[Sequence[str | Cell]]) -> str:
    """A table in markdown: first column left, the others right."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    texts = ([cell.text if isinstance(cell, Cell) else cell for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *texts))


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_whole(path: Path, content: bytes) -> bool:
    """Replace a file at once, so that no reader meets half of it. False if nothing changed."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
    return True
