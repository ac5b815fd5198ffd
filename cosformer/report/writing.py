"""How numbers, tables and files are written."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cosformer.records import Row

MISSING = "–"

Spell = Callable[[float], str]
"""How a number is written."""


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

    @property
    def markdown(self) -> str:
        """The table without its title."""
        return markdown(self.header, self.lines)


def words(*texts: str) -> list[Cell]:
    """Cells that no rows are behind."""
    return [Cell(text) for text in texts]


def cell_of(
    run: Sequence[Row], what: str, name: str, at: Mapping[str, object], spell: Spell
) -> Cell:
    """The number of one candidate and setting as text; the reason if there is none."""
    wanted = {"candidate": name, **at}
    for row in run:
        if all(row.config.get(key) == value for key, value in wanted.items()):
            if row.what == what:
                return Cell(spell(row.value), [row])
            if row.what == "failed":
                return Cell(str(row.config["reason"]).partition(":")[0], [row])
    return Cell(MISSING)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str | Cell]]) -> str:
    """A table in markdown: first column left, the others right."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    texts = ([cell.text if isinstance(cell, Cell) else cell for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *texts))


def told(grids: Sequence[Grid], *texts: str | Sequence[str]) -> str:
    """Tables in markdown, each below its title, then paragraphs and lists that are not empty."""
    parts = [f"{grid.title}:\n\n{grid.markdown}" for grid in grids]
    for text in filter(None, texts):
        parts.append(text if isinstance(text, str) else "\n".join(f"* {line}" for line in text))
    return "\n\n".join(parts)


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.2g} MiB"


def spread(values: Sequence[float], digits: int) -> str:
    """The mean over seeds, their standard deviation and their number."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)})"


def write_whole(path: Path, content: bytes) -> bool:
    """Replace a file at once, so that no reader meets half of it. False if nothing changed."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError:  # as of a full disk
        unfinished.unlink(missing_ok=True)
        raise
    return True
