"""What the script of a page draws: lines of numbers from rows, ready to be switched on and off."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cosformer.records import Row
from cosformer.report.mechanisms import REFERENCES
from cosformer.report.reproduce import LOST, REPRODUCED, shown_rows
from cosformer.report.selection import PASSES, crossover, run_with, runs_of_each, times
from cosformer.report.study import (
    COMPARED,
    DRAWN,
    UNITS,
    best_by_entry,
    judged_rows,
    paper_of,
    size_of,
    spell_size,
)

Chart = dict[str, Any]
"""Title, names of the axes and views; a view has lines, and an axis may be logarithmic."""
FIRST = ("softmax", "cosformer", "cosformer-multiscale", "cosformer-gated", "linear", "performer")
"""Mechanisms whose lines one sees before anything is switched."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def length_charts(sources: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """Time and memory of every mechanism against the length; a view for each machine and pass."""
    time_views, memory_views = [], []
    for rows in sources.values():
        run = runs_of_each(rows, "time")
        where = run[0].hardware["name"]
        for name in reversed(PASSES):
            title = f"{PASSES[name]}, {where}"
            if alone := times(run, name, "time_graph"):
                time_views.append(_view(f"{title}, without the host", alone))
            if found := times(run, name):
                time_views.append(_view(title, found))
            if held := _memory(run, name):
                memory_views.append(_view(title, held))
    return [
        _chart("time", "Time of attention", "tokens", "milliseconds", time_views),
        _chart("memory", "Memory of attention beyond its inputs", "tokens", "MiB", memory_views),
    ]


def loss_charts(studies: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """Losses of studies: in training against tokens and seconds, and by position."""
    along_tokens, along_seconds, by_position = [], [], []
    unit = "bits"
    for rows in studies.values():
        for title, best in _sizes(rows):
            runs = {name: each[0].config for name, each in best.items()}
            drawn = {name: c for name, c in runs.items() if c.get("curve")}
            tokens = {
                name: [[step * c["batch"] * c["length"] / 1e6, v] for step, v, _ in c["curve"]]
                for name, c in drawn.items()
            }
            alone = {name: c["curve"] for name, c in drawn.items() if c["jobs"] == 1}
            seconds = {name: [[t, v] for _, v, t in curve] for name, curve in alone.items()}
            places = {name: list(_positions(each)) for name, each in best.items()}
            shown = _first_entries(best)
            along_tokens.append(_lines(title, tokens, shown))
            by_position.append(_lines(title, places, shown))
            if seconds:
                along_seconds.append(_lines(title, seconds, shown))
    charts = [
        _chart("loss", "Loss in training", "million tokens", unit, along_tokens),
        _chart(
            "loss-time", "Loss in training, alone on the device", "seconds", unit, along_seconds
        ),
        _chart("position", "Loss on validation by position", "position", unit, by_position),
    ]
    return [chart for chart in charts if chart["views"]]


def judged_chart(tables: Mapping[str, Sequence[Row]]) -> Chart | None:
    """How runs of published tables were judged on validation as they went on."""
    views = []
    for name, rows in tables.items():
        for column, style in REPRODUCED[name].columns.items():
            mine = [r for r in shown_rows(name, rows) if r.config["column"] == column]
            judged = [r for r in mine if r.what not in LOST]
            lines: dict[str, list[list[float]]] = {}
            for row in sorted(judged, key=lambda row: row.config["valid"], reverse=style.lower):
                last = row.config["valid_curve"][-1][0]
                lines[row.config["entry"]] = [  # the best run of an entry is the last
                    [step, style.factor * metrics[row.what]]
                    for phase, step, metrics in row.config["valid_curve"]
                    if phase == last and row.what in metrics
                ]
            if lines:
                views.append(_lines(f"{name}: {style.title}", lines, FIRST))
    return _chart("judged", "On validation", "step", "", views, log="x") if views else None


def memory_chart(
    written: Sequence[Row],
    studies: Mapping[str, Sequence[Row]],
    generated: Mapping[str, Sequence[Row]],
) -> Chart | None:
    """Memory of a stream as it grows: of models that write, of studies, and of bare decoders."""
    views = []
    if lines := {r.config["candidate"]: _points(r.config["stream_bytes"]) for r in written}:
        views.append(_lines("the models above", lines, tuple(lines)))
    for rows in studies.values():
        for title, best in _sizes(rows):
            held = {name: each[0].config.get("stream_bytes") or {} for name, each in best.items()}
            lines = {name: _points(each) for name, each in held.items() if each}
            if lines:
                views.append(_lines(title, lines, _first_entries(best)))
    for rows in generated.values():
        sizes: dict[str, dict[float, float]] = {}  # the same for any number of streams
        for row in run_with(rows, "token_time"):
            if row.what == "stream_memory":
                mine = sizes.setdefault(row.config["candidate"], {})
                mine[row.config["position"]] = row.value / 2**20
        bare = {name: [[n, mine[n]] for n in sorted(mine)] for name, mine in sizes.items()}
        title = f"decoders of cosformer bench generation, {rows[0].hardware['name']}"
        views += [_lines(title, bare, tuple(bare))] if bare else []
    title = "Memory of a stream"
    return _chart("stream", title, "tokens so far", "MiB", views) if views else None


def _chart(
    name: str, title: str, x: str, y: str, views: Sequence[dict[str, Any]], log: str = "xy"
) -> Chart:
    axes = {"x": {"label": x, "log": "x" in log}, "y": {"label": y, "log": "y" in log}}
    lines = [line for view in views for line in view["lines"]]
    found = {line["name"] for line in lines}
    first = [each for each in FIRST if each in found]  # a mechanism has one colour in all charts
    shown = [line["name"] for line in lines if line["on"]]
    names = dict.fromkeys([*first, *shown, *(line["name"] for line in lines)])
    return {"id": name, "title": title, **axes, "names": list(names), "views": list(views)}


def _view(title: str, found: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """Lines over lengths, each with the length from which on it stays below softmax."""
    view = _lines(title, {name: sorted(map(list, p.items())) for name, p in found.items()}, FIRST)
    theirs = next(reversed(REFERENCES))
    for line in view["lines"]:
        if theirs in found and line["name"] != theirs:
            line["below"] = crossover(dict(found[line["name"]]), dict(found[theirs]))
    return view | {"against": theirs if theirs in found else None}


def _lines(
    title: str, points: Mapping[str, Sequence[Sequence[float]]], shown: Sequence[str]
) -> dict[str, Any]:
    lines = [
        {
            "name": name,
            "points": [[_short(v) for v in point] for point in each],
            "on": name in shown,
        }
        for name, each in points.items()
    ]
    return {"name": title, "lines": lines}


def _short(value: float) -> float:
    """Four digits are more than a screen shows."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _points(held: Mapping[str, Any]) -> list[list[float]]:
    """Tokens and mebibytes; a row may tell bytes by what needs them."""
    totals = {int(n): sum(b.values()) if isinstance(b, Mapping) else b for n, b in held.items()}
    return [[length, count / 2**20] for length, count in sorted(totals.items())]


def _memory(run: Sequence[Row], pass_name: str) -> dict[str, dict[int, float]]:
    """Candidate -> length -> mebibytes; rows tell multiples of q, k and v."""
    found: dict[str, dict[int, float]] = {}
    for row in run:
        c = row.config
        if row.what == "peak_memory" and c["pass"] == pass_name and row.value > 0:
            inputs = 3 * c["batch"] * c["heads"] * c["length"] * c["width"] * BYTES[c["dtype"]]
            found.setdefault(c["candidate"], {})[c["length"]] = row.value * inputs / 2**20
    return found


def _sizes(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, list[Row]]]]:
    """The runs of a study by their size, entries at their best rate, with a title."""
    judged = judged_rows(rows)
    for size in sorted(set(map(size_of, judged))):
        mine = [row for row in judged if size_of(row) == size]
        unit = UNITS[mine[0].what]
        yield f"{unit}: {spell_size(mine[0])}", best_by_entry(mine)


def _first_entries(best: Mapping[str, Sequence[Row]]) -> list[str]:
    """The best entries, softmax, and cosFormer as published."""
    usual = [name for name in (COMPARED, paper_of(best)) if name is not None and name in best]
    return [*list(best)[:DRAWN], *usual]


def _positions(rows: Sequence[Row]) -> Iterator[list[float]]:
    """Losses by position, the mean over seeds; beyond the length of training where rows tell it."""
    c = rows[0].config
    for n in range(len(c["by_position"])):
        mean = statistics.fmean(row.config["by_position"][n] for row in rows)
        yield [(n + 0.5) * c["bin"], mean]
    far = [row.config["far"] for row in rows if row.config.get("far")]
    for n in range(1, min(map(len, far), default=0)):
        values = [each[n] for each in far if each[n] is not None]
        if values:
            yield [(n + 0.5) * c["length"], statistics.fmean(values)]
