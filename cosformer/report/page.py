"""The page of a demo: one HTML file that needs nothing else, made of rows, text and maps."""

import html
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cosformer.records import Row
from cosformer.report.figures import time_vs_length
from cosformer.report.learning import (
    NAMES,
    floor_sentence,
    last_values,
    learning_figure,
    summary,
    verdict,
)
from cosformer.report.maps import Maps, attention_figure
from cosformer.report.selection import crossover_sentence, origin, times

TITLES = {
    "short": "A language model of Python's manual",
    "long": "Both models go on in long windows",
}
"""What is learnt, in the order of the page."""
KINDS = ("ours", "theirs")
"""Classes of the two mechanisms in the style."""
STYLE = """
:root { --ink: #222; --faint: #6a7077; --line: #e3e6e9; --paper: #fff; --box: #f5f7f8;
        --ours: #0b6e99; --theirs: #c4501b }
body { max-width: 60rem; margin: 2.5rem auto; padding: 0 1rem; color: var(--ink);
       background: var(--paper); font: 16px/1.55 system-ui, sans-serif }
h1, h2 { line-height: 1.2 } h1 { margin-bottom: 0 } h2 { margin-top: 3rem }
.origin { color: var(--faint); font-size: .85rem }
.verdict { font-size: 1.2rem; border-left: 4px solid var(--ours); padding: .2rem 0 .2rem 1rem }
.table { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .3rem 1.5rem .3rem 0; text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left } tr + tr { border-top: 1px solid var(--line) }
th:nth-child(2), .ours { color: var(--ours) } th:nth-child(3), .theirs { color: var(--theirs) }
pre { background: var(--box); border-radius: 6px; padding: .8rem 1rem; margin: .6rem 0;
      white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .6rem 1rem }
.pair > * { margin: 0 } svg { max-width: 100%; height: auto }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --faint: #969ca3; --line: #33373c; --paper: #16181b; --box: #22252a;
          --ours: #57b6df; --theirs: #e58a5c }
  svg { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen }
}
"""


class Shown(NamedTuple):
    """What is no number: each by the name of the mechanism."""

    formulas: Mapping[str, str]
    texts: Mapping[str, Mapping[str, str]] = {}
    """Prompt -> what the trained model wrote after it."""
    maps: Mapping[str, Maps] = {}
    """The weights of each head over a window of text."""
    window: str = ""
    """The text of that window."""


def page(rows: Sequence[Row], shown: Shown) -> str:
    """From one run of the demo."""
    parts = [
        f"<h1>cosFormer beside softmax</h1>{_paragraph(origin(rows[0], 'CPU'), 'origin')}",
        _paragraph(verdict(rows), "verdict"),
        _compared(shown.formulas),
    ]
    parts += [_task(rows, task) for task in TITLES if last_values(rows, task, "train_loss")]
    if shown.texts:
        parts.append(_texts(shown.texts))
    if shown.maps:
        parts.append(_maps(shown))
    parts.append(_op(rows))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>cosFormer demo</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _compared(formulas: Mapping[str, str]) -> str:
    said = (
        "Two models that differ in their attention alone learn from the same batches, in turns. "
        "Both have a norm and a gate after their heads. cosFormer has a decay γ for each token and "
        "no other positions: its sums over j are a small state, so its time is linear. Softmax has "
        "what helps it most, rotary positions and a short convolution, and PyTorch's fused kernel: "
        "its time is quadratic. Each has the rate that was best for it in runs of 1,500 steps."
    )
    lines = "\n".join(f"{NAMES[name] + ':':<11}{each}" for name, each in formulas.items())
    return f"{_paragraph(said)}<pre>{html.escape(lines)}</pre>"


def _task(rows: Sequence[Row], task: str) -> str:
    figure = _inline(learning_figure(rows, task, "svg"))
    last = next(iter(last_values(rows, task, "train_loss").values())).config
    said = f"{last['step']:,} steps with windows of {last['length']:,} tokens."
    return (
        f"<h2>{TITLES[task]}</h2>{_paragraph(said)}{_table(summary(rows, task))}"
        f"{_paragraph(floor_sentence(rows, task))}{figure}"
    )


def _texts(texts: Mapping[str, Mapping[str, str]]) -> str:
    """A column for each mechanism, a line for each prompt."""
    heads = [
        f'<h3 class="{kind}">{NAMES[name]}</h3>' for name, kind in zip(texts, KINDS, strict=True)
    ]
    boxes = [
        f"<pre><b>{html.escape(prompt)}</b>{html.escape(written[prompt].rstrip())}</pre>"
        for prompt in next(iter(texts.values()))
        for written in texts.values()
    ]
    return f'<h2>What both models write</h2><div class="pair">{"".join(heads + boxes)}</div>'


def _maps(shown: Shown) -> str:
    said = (
        "The exact weights of every head over the first tokens of the validation text: each row "
        "is a token and sums to 1, each column a token that it looks at. Colour follows the "
        "square root of the weight. The text of the window:"
    )
    figure = _inline(attention_figure(shown.maps, "svg"))
    text = f"<pre>{html.escape(shown.window)}</pre>"
    return f"<h2>Where both models look</h2>{figure}{_paragraph(said)}{text}"


def _op(rows: Sequence[Row]) -> str:
    """Errors and times of the op."""
    errors = [row for row in rows if row.what == "error"]
    worst = max((row.value for row in errors), default=0.0)
    exact = (
        f"The linear form in float32 differs from the quadratic formula in float64 by at most "
        f"{worst:.1e} of the largest value, in {len(errors)} comparisons of outputs, gradients "
        f"and a stream."
    )
    parts = [f"<h2>The op</h2>{_paragraph(exact)}"] if errors else []
    if found := times(rows, "forward"):
        parts.append(_paragraph(crossover_sentence(found) + "."))
        parts.append(_inline(time_vs_length(rows, "svg")))
    return "".join(parts)


def _table(lines: Sequence[Sequence[str]]) -> str:
    header, *rest = lines
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in rest
    )
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"


def _inline(svg: bytes) -> str:
    """The picture itself, without the prologue that only a file of its own has."""
    return re.sub(r"^.*?(?=<svg)", "", svg.decode(), flags=re.DOTALL)
