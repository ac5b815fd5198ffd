"""Trained models on a page: maps of their heads side by side, and what they write."""

import html
from collections.abc import Sequence
from typing import Any

from cosformer.records import Row
from cosformer.report.html import Book, button, paragraph
from cosformer.report.selection import LABELS
from cosformer.report.training import mebibytes

NAMES = {**LABELS, "cosformer-multiscale": "cosFormer, multiscale", "softmax": "softmax"}
"""Names of mechanisms for readers who see their maps."""


def newest(rows: Sequence[Row], what: str) -> dict[str, list[Row]]:
    """Candidate -> its rows of the newest run that has this quantity."""
    mine = [row for row in rows if row.what == what]
    last = max((row.date for row in mine), default="")
    found: dict[str, list[Row]] = {}
    for row in mine:
        if row.date == last:
            found.setdefault(row.config["candidate"], []).append(row)
    return found


def name_of(candidate: str) -> str:
    return NAMES.get(candidate, candidate)


def maps_part(rows: Sequence[Row]) -> str:
    """Where the script draws the maps, and the words around them; empty without rows."""
    found = newest(rows, "reach")
    if not found:
        return ""
    [first, *_] = next(iter(found.values()))
    layers = max(row.config["layers"] for each in found.values() for row in each)
    said = (
        f"The exact weights of every head over the first {len(first.config['pieces'])} tokens of "
        "the validation text: each line of a map is a token, each column a token that it looks "
        "at. The shade follows the square root of the weight. Point at a map, or move through it "
        "with the arrow keys, to read a weight."
    )
    further = (
        "Below: the share of its weight that each head gives to tokens at a distance, over "
        f"{first.config['window']:,} tokens. Tokens in the first half are left out, for they have "
        "no far past."
    )
    # textContent of the script would do, but without a script the window can still be read
    text = html.escape("".join(first.config["pieces"]))
    return (
        f'{paragraph(said)}<div id="maps" class="maps">'
        f'<p class="control"><label for="layer">Layer</label> '
        f'<input id="layer" type="range" min="1" max="{layers}" value="1">'
        f' <output for="layer" id="layer-shown">1 of {layers}</output></p>'
        '<p id="weight" class="readout" aria-live="polite">&nbsp;</p>'
        '<div id="maps-drawn" class="columns"></div></div>'
        f'{paragraph(further)}<div id="distances" class="columns"></div>'
        f"<details><summary>The text of the window</summary><pre>{text}</pre></details>"
    )


def maps_data(rows: Sequence[Row], book: Book) -> list[dict[str, Any]]:
    """For each model the rows of its layers, by their numbers."""
    return [
        {"name": name_of(name), "layers": book.numbers(sorted(each, key=_layer))}
        for name, each in newest(rows, "reach").items()
    ]


def texts_part(rows: Sequence[Row], book: Book) -> str:
    """A column for each model, a line for each prompt; empty without rows."""
    found = newest(rows, "written")
    if not found:
        return ""
    columns = []
    for name, mine in found.items():
        boxes = "".join(_text(row, book) for row in mine)
        columns.append(f"<div><h3>{html.escape(name_of(name))}</h3>{boxes}</div>")
    return f'<div class="columns">{"".join(columns)}</div>'


def memory_sentence(rows: Sequence[Row]) -> str:
    """Which streams keep their size and which grow; empty without rows."""
    flat, growing = [], []
    for name, (row, *_) in newest(rows, "written").items():
        sizes = {int(n): held for n, held in row.config["stream_bytes"].items()}
        if len(sizes) < 2:
            continue
        first, last = min(sizes), max(sizes)
        if sizes[first] == sizes[last]:
            flat.append(f"{name_of(name)} {mebibytes(sizes[last])} from {first:,} to {last:,}")
        else:
            growing.append(
                f"{name_of(name)} grows from {mebibytes(sizes[first])} at {first:,} to "
                f"{mebibytes(sizes[last])} at {last:,}"
            )
    parts = [f"flat: {', '.join(flat)} tokens"] * bool(flat)
    parts += [f"a cache: {', '.join(growing)} tokens"] * bool(growing)
    return f"Memory of a stream. {'; '.join(parts).capitalize()}." if parts else ""


def _text(row: Row, book: Book) -> str:
    c = row.config
    held = button(f"{mebibytes(row.value)} after {c['tokens']:,} tokens", [row], book)
    return (
        f"<pre><b>{html.escape(c['prompt'])}</b>{html.escape(c['written'].rstrip())}</pre>"
        f'<p class="origin">remembers {held}</p>'
    )


def _layer(row: Row) -> int:
    return int(row.config["layer"])
