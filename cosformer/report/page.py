"""The page of a demo: one HTML file that needs nothing else, made of rows and of text."""

import html
import re
from collections.abc import Mapping, Sequence

from cosformer.records import Row
from cosformer.report.figures import time_vs_length
from cosformer.report.learning import learning_figure, summary
from cosformer.report.selection import crossover_sentence, origin, times

TITLES = {
    "lm": "A language model of Python's manual",
    "listops": "ListOps: the value of nested operators",
}
STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222;
       font: 16px/1.5 system-ui, sans-serif }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: right }
td:first-child, th:first-child { text-align: left }
tr + tr { border-top: 1px solid #e6e8eb }
pre { background: #f6f7f8; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto } .origin { color: #777; font-size: .85rem }
@media (prefers-color-scheme: dark) {
  body { background: #16181b; color: #ddd } pre { background: #22252a } svg { border-radius: 6px }
  tr + tr { border-color: #333 }
}
"""


def page(rows: Sequence[Row], texts: Mapping[str, str]) -> str:
    """From one run of the demo; `texts`: prompt -> what the trained model wrote after it."""
    parts = [f"<h1>cosFormer beside softmax</h1>{_paragraph(origin(rows[0], 'CPU'), 'origin')}"]
    parts.append(_op(rows))
    parts += [_task(rows, task) for task in TITLES if _has_curve(rows, task)]
    if texts:
        written = "".join(
            f"<pre><b>{html.escape(prompt)}</b>{html.escape(text)}</pre>"
            for prompt, text in texts.items()
        )
        parts.append(f"<h2>What the cosFormer model writes</h2>{written}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>cosFormer demo</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


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


def _task(rows: Sequence[Row], task: str) -> str:
    figure = _inline(learning_figure(rows, task, "svg"))
    about = next((row.config["floor_is"] for row in rows if _is_floor(row, task)), "")
    floor = next((row.value for row in rows if _is_floor(row, task)), None)
    beat = "" if floor is None else _paragraph(f"To beat: {floor:.3f} ({about}).")
    return f"<h2>{TITLES[task]}</h2>{_table(summary(rows, task))}{beat}{figure}"


def _is_floor(row: Row, task: str) -> bool:
    return row.what == "floor" and row.config.get("task") == task


def _has_curve(rows: Sequence[Row], task: str) -> bool:
    return any(row.what == "train_loss" and row.config["task"] == task for row in rows)


def _table(lines: Sequence[Sequence[str]]) -> str:
    header, *rest = lines
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in rest
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"


def _inline(svg: bytes) -> str:
    """The picture itself, without the prologue that only a file of its own has."""
    return re.sub(r"^.*?(?=<svg)", "", svg.decode(), flags=re.DOTALL)
