"""Trained models on a page: maps of their heads side by side, and what they write."""

import html
from collections.abc import Sequence
from typing import Any

from cosformer.records import Row
from cosformer.report.html import Book, button, paragraph
from cosformer.report.selection import LABELS, origin
from cosformer.report.writing import mebibytes

NAMES = {
    **LABELS,
    "cosformer-multiscale": "cosFormer, multiscale",
    "cosformer-gated": "cosFormer, gated",
    "softmax": "softmax",
}
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
        "at. The shade follows the square root of the weight, and below a map stands how many "
        f"tokens its head looks back in the mean over {first.config['window']:,} tokens. Point at "
        "a map, or move through it with the arrow keys, to read a weight."
    )
    further = (
        "The share of its weight that each head gives to tokens at a distance. Tokens in the first "
        "half of the window are left out, for they have no far past."
    )
    text = html.escape("".join(first.config["pieces"]))
    return (
        f'{paragraph(said)}<div id="maps" class="maps">'
        f'<p class="control"><label for="layer">Layer</label> '
        f'<input id="layer" type="range" min="1" max="{layers}" value="1">'
        f' <output for="layer" id="layer-shown">1 of {layers}</output></p>'
        '<p id="weight" class="readout" aria-live="polite">&nbsp;</p>'
        '<div id="maps-drawn" class="columns"></div></div>'
        f'<h3>Weight over distance</h3>{paragraph(further)}<p id="heads-key" class="key"></p>'
        '<div id="distances" class="columns"></div>'
        f"<details><summary>The text of the window</summary><pre>{text}</pre></details>"
    )


def maps_data(rows: Sequence[Row], book: Book) -> list[dict[str, Any]]:
    """For each model the rows of its layers, by their numbers."""

    def layer(row: Row) -> int:
        return int(row.config["layer"])

    return [
        {"name": name_of(name), "layers": book.numbers(sorted(each, key=layer))}
        for name, each in newest(rows, "reach").items()
    ]


def texts_part(rows: Sequence[Row], book: Book) -> str:
    """What models write after each prompt, side by side; empty without rows."""
    found = [row for each in newest(rows, "written").values() for row in each]
    prompts = dict.fromkeys(row.config["prompt"] for row in found)
    return "".join(
        f'<div class="columns">{"".join(_text(r, book) for r in found if r.config["prompt"] == p)}'
        "</div>"
        for p in prompts
    )


def models_note(rows: Sequence[Row]) -> str:
    """Which models are looked at, and how well they have learnt; empty without rows."""
    found = [each[0] for each in newest(rows, "reach").values()]
    if not found:
        return ""
    c = found[0].config
    losses = ", ".join(
        f"{name_of(row.config['candidate'])} {row.config['valid']['loss']:.3f}" for row in found
    )
    setting = f"preset {c['preset']} of {c['layers']} layers, {c['steps']:,} steps"
    learnt = f"sequences of {c['length']:,} tokens of {c['text']}"
    said = f"By cosformer look. Loss on validation, nats: {losses}"
    return f"{said}. {origin(found[0], f'{setting} on {learnt}')}."


def memory_sentence(rows: Sequence[Row]) -> str:
    """Which streams keep their size and which grow; empty without rows."""
    flat, growing = list[str](), list[str]()
    for name, (row, *_) in newest(rows, "written").items():
        sizes = {int(n): held for n, held in row.config["stream_bytes"].items()}
        if len(sizes) < 2:
            continue
        first, last = min(sizes), max(sizes)
        if sizes[first] == sizes[last]:
            held = f"{mebibytes(sizes[last])} from {first:,} to {last:,} tokens"
            flat.append(f"{name_of(name)} remembers {held}")
        else:
            held = f"{mebibytes(sizes[first])} at {first:,} tokens"
            held += f" and {mebibytes(sizes[last])} at {last:,}"
            growing.append(f"{name_of(name)} remembers {held}")
    told = {"flat memory": flat, "a growing cache": growing}
    said = "; ".join(f"{kind}: {', '.join(each)}" for kind, each in told.items() if each)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def _text(row: Row, book: Book) -> str:
    c = row.config
    held = button(f"{mebibytes(row.value)} after {c['tokens']:,} tokens", [row], book)
    return (
        f"<div><h3>{html.escape(name_of(c['candidate']))}</h3>"
        f"<pre><b>{html.escape(c['prompt'])}</b>{html.escape(c['written'].rstrip())}</pre>"
        f'<p class="origin">remembers {held}</p></div>'
    )
