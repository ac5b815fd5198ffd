"""One HTML file that needs nothing else: style and script inside, rows as JSON, once."""

import dataclasses
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosformer.records import Row
from cosformer.report.writing import MISSING, Cell, Grid, words

HERE = Path(__file__).parent
UNMEASURED = "not measured yet"
"""What a cell says in place of a number that nobody has measured."""

DIALOG = (
    '<dialog id="rows" aria-labelledby="rows-title"><form method="dialog">'
    '<h2 id="rows-title">Rows</h2><button>Close</button></form><pre tabindex="0"></pre></dialog>'
)
"""Where the script shows rows."""


class Book:
    """The rows that a page shows, each once, and the number by which the page calls it."""

    def __init__(self, sources: Mapping[str, Sequence[Row]]) -> None:
        self._files = {id(row): name for name, rows in sources.items() for row in rows}
        self._numbers: dict[int, int] = {}
        self._kept: list[Row] = []  # which also keeps the ids of rows their own

    def numbers(self, rows: Sequence[Row]) -> list[int]:
        """What the page calls these rows."""
        for row in rows:
            if id(row) not in self._numbers:
                self._numbers[id(row)] = len(self._kept)
                self._kept.append(row)
        return [self._numbers[id(row)] for row in rows]

    def plain(self) -> dict[str, Any]:
        """The rows for JSON; what all rows of a run share is written once."""
        runs: dict[str, int] = {}
        rows = []
        for row in self._kept:
            fields = dataclasses.asdict(row)
            own = {name: fields.pop(name) for name in ("what", "value", "unit", "config")}
            shared = json.dumps({"file": self._files.get(id(row), ""), **fields})
            rows.append({**own, "run": runs.setdefault(shared, len(runs))})
        return {"runs": [json.loads(each) for each in runs], "rows": rows}


def document(title: str, parts: Sequence[str], data: Mapping[str, Any]) -> str:
    """The page; `data` is what its script draws from."""
    style, script = ((HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    content = content.replace("<", "\\u003c")  # neither </script> nor <!-- ends the block early
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(parts)}</main>{DIALOG}"
        f'<script type="application/json" id="data">{content}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """Text as it is, never as HTML."""
    return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"


def section(name: str, title: str, *parts: str) -> str:
    """A heading that can be linked to, and what is below it."""
    inner = "".join(parts)
    return f'<section id="{name}"><h2>{html.escape(title)}</h2>{inner}</section>'


def table(grid: Grid, book: Book | None = None) -> str:
    """A table that scrolls in itself; with a book, a number opens the rows behind it."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in grid.header)
    body = "".join(_line(line, book) for line in grid.lines)
    caption = f"<caption>{html.escape(grid.title)}</caption>" if grid.title else ""
    label = html.escape(grid.title or "table", quote=True)
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{label}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def notes(title: str, lines: Sequence[str]) -> str:
    """What is read on demand, such as a protocol; empty without lines."""
    if not lines:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<details><summary>{html.escape(title)}</summary><ul>{items}</ul></details>"


def from_markdown(text: str) -> str:
    """Tables, lists and paragraphs as the functions of `TABLES` write them."""
    return "".join(_block(block) for block in text.split("\n\n") if block.strip())


def button(text: str, rows: Sequence[Row], book: Book) -> str:
    """Text that opens its rows."""
    numbers = " ".join(map(str, book.numbers(rows)))
    many = f"{len(rows)} row" + "s" * (len(rows) != 1)
    return (
        f'<button type="button" class="rows" data-rows="{numbers}" aria-haspopup="dialog" '
        f'title="{many} behind it">{text}</button>'
    )


def _block(block: str) -> str:
    lines = block.strip().splitlines()
    if lines[0].startswith("|"):
        header, _, *rest = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        return table(Grid(header, [words(*line) for line in rest]))
    if lines[0].startswith("* "):
        return f"<ul>{''.join(f'<li>{html.escape(line[2:])}</li>' for line in lines)}</ul>"
    return paragraph(block, "origin")


def _line(line: Sequence[Cell], book: Book | None) -> str:
    first, *rest = line
    kind = ' class="published"' if first.text.startswith("*") else ""
    cells = "".join(f"<td>{_inner(cell, book)}</td>" for cell in rest)
    return f'<tr{kind}><th scope="row">{_emphasis(first.text)}</th>{cells}</tr>'


def _inner(cell: Cell, book: Book | None) -> str:
    text = _emphasis(cell.text)
    if cell.text == MISSING and cell.why:
        text = f'<span class="why">{html.escape(cell.why)}</span>'
    elif cell.text == UNMEASURED:
        text = f'<span class="why">{UNMEASURED}</span>'
    is_empty = cell.text == MISSING and not cell.why
    return text if book is None or is_empty or not cell.rows else button(text, cell.rows, book)


def _emphasis(text: str) -> str:
    """Markdown's stars as HTML has them."""
    text = re.sub(r"^\*\*(.*)\*\*$", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"^\*([^*]+)\*$", r"<em>\1</em>", text)
