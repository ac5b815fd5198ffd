"""The page of a demo: one HTML file that needs nothing else, made of rows."""

import html
import re
from collections.abc import Mapping, Sequence

from cosformer.records import Row
from cosformer.report.figures import time_vs_length
from cosformer.report.html import Book, document, paragraph, section, table
from cosformer.report.learning import (
    NAMES,
    floor_sentence,
    last_values,
    learning_figure,
    summary,
    verdict,
)
from cosformer.report.looking import maps_data, maps_part, texts_part
from cosformer.report.selection import crossover_sentence, origin, times
from cosformer.report.writing import Grid, words

TITLES = {
    "short": "A language model of Python's manual",
    "long": "Both models go on in long windows",
}
"""What is learnt, in the order of the page."""


def demo_page(rows: Sequence[Row], formulas: Mapping[str, str]) -> str:
    """From one run of the demo. `formulas`: mechanism -> what it computes."""
    book = Book({"demo": rows})
    parts = [
        f"<h1>cosFormer beside softmax</h1>{paragraph(origin(rows[0], 'CPU'), 'origin')}",
        paragraph(verdict(rows), "verdict"),
        _compared(formulas),
    ]
    parts += [_task(rows, task) for task in TITLES if last_values(rows, task, "train_loss")]
    if texts := texts_part(rows, book):
        parts.append(section("texts", "What both models write", texts))
    if maps := maps_part(rows):
        parts.append(section("maps-of-heads", "Where both models look", maps))
    parts.append(_op(rows))
    data = {"maps": maps_data(rows, book), "charts": [], **book.plain()}
    return document("cosFormer demo", parts, data)


def _compared(formulas: Mapping[str, str]) -> str:
    said = (
        "Two models learn from the same batches, in turns. They have equally many layers of equal "
        "width and differ in their attention and in what helps it most. cosFormer has a decay γ "
        "for each token, a norm and a gate after its heads, and no positions; its sums over j are "
        "a small state, so its time is linear. Softmax has rotary positions, a short convolution "
        "and PyTorch's fused kernel; its time is quadratic. Each has the learning rate that was "
        "best for it in runs of 1,500 steps."
    )
    lines = "\n".join(f"{NAMES[name] + ':':<11}{each}" for name, each in formulas.items())
    return f"{paragraph(said)}<pre>{html.escape(lines)}</pre>"


def _task(rows: Sequence[Row], task: str) -> str:
    figure = _inline(learning_figure(rows, task, "svg"))
    last = next(iter(last_values(rows, task, "train_loss").values())).config
    said = f"{last['step']:,} steps with windows of {last['length']:,} tokens."
    header, *lines = summary(rows, task)
    found = table(Grid(header, [words(*line) for line in lines]))
    floor = paragraph(floor_sentence(rows, task))
    return section(task, TITLES[task], paragraph(said), found, floor, figure)


def _op(rows: Sequence[Row]) -> str:
    """Errors and times of the op."""
    errors = [row for row in rows if row.what == "error"]
    worst = max((row.value for row in errors), default=0.0)
    exact = (
        f"The linear form in float32 differs from the quadratic formula in float64 by at most "
        f"{worst:.1e} of the largest value, in {len(errors)} comparisons of outputs, gradients "
        f"and a stream."
    )
    parts = [paragraph(exact)] if errors else []
    if found := times(rows, "forward"):
        parts.append(paragraph(crossover_sentence(found) + "."))
        parts.append(_inline(time_vs_length(rows, "svg")))
    return section("op", "The op", *parts) if parts else ""


def _inline(svg: bytes) -> str:
    """The picture itself, without the prologue that only a file of its own has."""
    inner = re.sub(r"^.*?(?=<svg)", "", svg.decode(), flags=re.DOTALL)
    return f'<div class="picture">{inner}</div>'
