"""How numbers, tables and files are written."""

import os
from collections.abc import Sequence
from pathlib import Path

MISSING = "–"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in markdown: first column left, the others right."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


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
