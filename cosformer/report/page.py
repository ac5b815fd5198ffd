"""The page of all rows: one HTML file with every table, figure and map, and their rows."""

import html
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from cosformer.records import Row
from cosformer.report.charts import Chart, judged_chart, length_charts, loss_charts, memory_chart
from cosformer.report.classifier import (
    classifier_claim,
    classifier_grids,
    classifier_limits,
    classifier_rule,
    machines,
)
from cosformer.report.generation import token_grid
from cosformer.report.html import (
    UNMEASURED,
    Book,
    button,
    document,
    from_markdown,
    notes,
    paragraph,
    section,
    table,
)
from cosformer.report.looking import maps_data, maps_part, memory_sentence, models_note, texts_part
from cosformer.report.mechanisms import length_claim, length_grid
from cosformer.report.reproduce import claim, protocol, reasons, reproduced_grid, rule
from cosformer.report.selection import describe, runs_of_each
from cosformer.report.speed import Pair, fastest_pairs
from cosformer.report.study import (
    MODELS,
    UNITS,
    best_by_entry,
    best_by_share,
    best_with_windows,
    mean_value,
    of_most,
    paper_of,
    probe_claim,
    probe_grids,
    probe_rule,
    spell_model,
    study_claim,
    study_grids,
    study_rule,
)
from cosformer.report.training import generation_grid, training_claim, training_grid, training_rule
from cosformer.report.writing import MISSING, Cell, Grid, mebibytes

Sources = Mapping[str, Sequence[Row]]
"""Name of a file of results -> its rows."""

TITLES = {
    "lra": "Long-Range Arena",
    "lra-pretrained": "Long-Range Arena after self-pretraining",
    "lm": "Causal language modelling",
    "mlm": "Masked pre-training, then fine-tuning",
    "ablation": "What each part of cosFormer is worth",
}
"""Published tables, in the order of the page."""
MACHINES = ("cuda", "cpu")
"""Ends of the names of files that benchmarks write."""
STUDIES = ("study-lm", "study-mlm")
"""Studies of text, whose runs have curves."""


class Headline(NamedTuple):
    """A figure that stands at the top."""

    number: str
    text: str
    rows: Sequence[Row]


def page(sources: Sources, further: Mapping[str, Sequence[str]] | None = None) -> str:
    """From the rows of all files; a part without rows says that nothing is measured yet.

    `further`: heading -> tables in markdown that stand at the end, folded.
    """
    book, charts = Book(sources), list[Chart]()
    measured = [name for name in TITLES if _is_measured(name, sources)]
    waiting = [name for name in TITLES if name not in measured]
    parts = [
        _head(sources),
        _headlines(sources, book),
        _contents(measured, waiting),
        _speed(sources, book, charts),
        *(_reproduced(name, sources, book) for name in measured),
        _probes(sources, book),
        _losses(sources, charts),
        _maps(sources),
        _writing(sources, book, charts),
        *(_reproduced(name, sources, book) for name in waiting),
        _further(further or {}),
    ]
    data: dict[str, Any] = {"maps": maps_data(sources.get("looking", ()), book), "charts": charts}
    return document("cosFormer, measured", parts, data | book.plain())


def headlines(sources: Sources) -> list[Headline]:
    """The figures that rows allow, each of one sentence."""
    found: list[Headline] = []
    pairs = fastest_pairs(
        [row for name in ("ops-cuda", "ops-cpu") for row in sources.get(name, ())]
    )
    for device in MACHINES:
        mine = [pair for pair in pairs if pair.ours.hardware["device"] == device]
        if mine:
            found.append(_faster(max(mine, key=lambda pair: pair.ours.config["length"])))
    found += _written(sources.get("generation-cuda", ()))
    if study := _studies(sources).get("study-lm"):
        best = best_by_entry(of_most(study))
        shares = best_by_share(best)
        if {Fraction(0), Fraction(1)} <= shares.keys():
            found += _learnt(best, shares)
    return found


def _faster(pair: Pair) -> Headline:
    ours, theirs = pair
    c, where = ours.config, ours.hardware["name"]
    text = (
        f"as fast as the fastest softmax of PyTorch: causal attention, forward + backward, "
        f"{c['length']:,} tokens, {where}"
    )
    return Headline(f"{theirs.value / ours.value:.3g} ×", text, pair)


def _written(rows: Sequence[Row]) -> list[Headline]:
    """Tokens a second beside softmax's, of as many streams, at the longest context of both."""
    fair = [
        row
        for row in rows
        if row.what == "generation_speed_ratio"
        and row.config["batch"] == row.config["to_batch"]
        and "softmax" not in row.config["candidate"]
    ]
    if not fair:
        return []
    best = max(fair, key=lambda row: (row.config["position"], row.config["batch"], row.date))
    c = best.config
    model = MODELS.get(c["candidate"], c["candidate"])
    text = (
        f"as many tokens a second as softmax with a cache: {model}, {c['batch']} streams "
        f"after {c['position']:,} tokens each, {best.hardware['name']}"
    )
    return [Headline(f"{best.value:.3g} ×", text, [best])]


def _learnt(best: Mapping[str, Sequence[Row]], shares: Mapping[Fraction, str]) -> list[Headline]:
    """Losses beside the best softmax, and what a stream remembers.

    `shares`: share of exact layers -> the best entry with it.
    """
    found, chosen, rival = list[Headline](), shares[Fraction(0)], shares[Fraction(1)]
    means = {name: mean_value(rows) for name, rows in best.items()}
    said = {name: spell_model(rows[0]) for name, rows in best.items()}
    unit = UNITS[best[chosen][0].what]
    who = {
        shares[share]: f"{said[shares[share]]}, {share} of its layers exact"
        for share in sorted(shares)[:2]
        if 0 < share < 1
    }
    if windowed := best_with_windows(best):
        who[windowed] = f"{said[windowed]} and windows, whose memory does not grow"
    who[chosen] = f"{said[chosen]}, without exact layers"
    if (paper := paper_of(best)) is not None:
        who.setdefault(paper, f"{said[paper]}, in its best form")
    for name in who:
        if name in best:
            numbers = f"has {means[name]:.3f}; {said[rival]} has {means[rival]:.3f}"
            text = f"{unit} (less is better) against the best softmax: {who[name]}, {numbers}"
            beyond = f"{means[name] - means[rival]:+.3f}"
            found.append(Headline(beyond, text, [*best[name], *best[rival]]))
    ours, theirs = (best[name][0] for name in (chosen, rival))
    both = ours.config["stream_bytes"].keys() & theirs.config["stream_bytes"].keys()
    if both:
        length = max(both, key=int)
        held = [sum(row.config["stream_bytes"][length].values()) for row in (ours, theirs)]
        text = (
            f"is all that {said[chosen]} remembers of {int(length):,} tokens; "
            f"softmax keeps {mebibytes(held[1])}"
        )
        found.append(Headline(mebibytes(held[0]), text, [ours, theirs]))
    return found


def _head(sources: Sources) -> str:
    rows = [row for each in sources.values() for row in each]
    machines = dict.fromkeys(str(row.hardware["name"]) for row in rows)
    days = [row.date[:10] for row in rows]
    said = (
        f"{len(rows):,} measured rows from {', '.join(machines)}, {min(days)} to {max(days)}. "
        "A number with dots below it opens the rows that it is made of."
        if rows
        else "There are no rows yet."
    )
    return (
        "<header><h1>cosFormer, measured</h1>"
        + paragraph(
            "Attention in linear time beside softmax and its rivals, in one code base, by one "
            "protocol for each table. Bad results stand here as they are."
        )
        + paragraph(said, "origin")
        + "</header>"
    )


def _headlines(sources: Sources, book: Book) -> str:
    boxes = "".join(
        f"<li><b>{button(html.escape(each.number), each.rows, book)}</b> "
        f"{html.escape(each.text)}</li>"
        for each in headlines(sources)
    )
    return f'<ul class="headlines">{boxes}</ul>' if boxes else ""


def _contents(measured: Sequence[str], waiting: Sequence[str]) -> str:
    titles = {"speed": "Speed", **{name: TITLES[name] for name in measured}}
    titles |= {"probes": "Probes", "losses": "Losses", "maps-of-heads": "Where heads look"}
    titles |= {"writing": "What models write", **{name: TITLES[name] for name in waiting}}
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in titles.items())
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _is_measured(name: str, sources: Sources) -> bool:
    """Whether a published table, or the study of its subject, has rows."""
    return bool(sources.get(f"reproduce-{name}") or _studies(sources).get(f"study-{name}"))


def _reproduced(name: str, sources: Sources, book: Book) -> str:
    """A published table measured anew, and the study of the same subject, where there is one."""
    rows = sources.get(f"reproduce-{name}", ())
    folded = notes("Protocol", protocol(name, rows))
    folded += notes("Cells that are empty or not final", reasons(name, rows))
    grids, about = [_filled(reproduced_grid(name, rows))], rule(name, rows)
    parts = _measured(f"reproduce {name}", grids, book, claim(name, rows), about, folded)
    if not rows:
        summary = "<summary>The table, of which nothing is measured yet</summary>"
        parts = ["<details>", summary, *parts, "</details>"]
    if study := _studies(sources).get(f"study-{name}"):
        parts.append("<h3>Many mechanisms under one protocol</h3>")
        told = study_claim(study), study_rule(study)
        parts += _measured(f"study {name}", study_grids(study), book, *told)
    return section(name, TITLES[name], *parts)


def _speed(sources: Sources, book: Book, charts: list[Chart]) -> str:
    parts = []
    if measured := _by_machine(sources, "mechanisms", "time"):
        drawn = length_charts(measured)
        charts += drawn
        said = (
            "Attention alone, on the same q, k and v for every mechanism. A row stays until it is "
            "measured anew: docs/comparison.md says which kernels of rivals have been deleted "
            "since, so that these rivals are slower now."
        )
        parts += [paragraph(said), *map(_figure, drawn)]
    for rows in measured.values():
        told = length_claim(rows), f"{describe(runs_of_each(rows, 'time'))}."
        parts += _measured("bench mechanisms", [length_grid(rows)], book, *told)
    for rows in _by_machine(sources, "training", "train_speed").values():
        told = training_claim(rows), f"{training_rule(rows)}."
        parts += _measured("bench training", [training_grid(rows)], book, *told)
    parts.append("<h3>The classifier of the paper's table</h3>")
    rows = sources.get("reproduce-speed", ())
    for mine in machines(rows) if rows else ():
        told = classifier_claim(mine), classifier_rule(mine)
        folded = notes("Places without a number", classifier_limits(mine))
        parts += _measured("reproduce speed", classifier_grids(mine), book, *told, folded)
    if not rows:
        parts.append(paragraph(f"{UNMEASURED.capitalize()}: cosformer reproduce speed", "why"))
    return section("speed", "Speed", *parts)


def _probes(sources: Sources, book: Book) -> str:
    rows = sources.get("study-probes", ())
    if not any(row.what == "accuracy" for row in rows):
        return _unmeasured("probes", "Probes", "cosformer reproduce probes")
    told = probe_claim(rows), probe_rule(rows)
    parts = _measured("reproduce probes", probe_grids(rows), book, *told)
    return section("probes", "Probes", *parts)


def _losses(sources: Sources, charts: list[Chart]) -> str:
    drawn = loss_charts(_studies(sources))
    tables = {name: rows for name in TITLES if (rows := sources.get(f"reproduce-{name}"))}
    judged = judged_chart(tables)
    drawn += [judged] if judged else []
    if not drawn:
        return _unmeasured("losses", "Losses", "cosformer study lm")
    charts += drawn
    said = (
        "Each entry at its best rate; a line is switched on and off by its name. Positions beyond "
        "the length of training have losses where models were judged on longer sequences."
    )
    return section("losses", "Losses", paragraph(said), *map(_figure, drawn))


def _maps(sources: Sources) -> str:
    looked = sources.get("looking", ())
    found = maps_part(looked)
    if not found:
        return _unmeasured("maps-of-heads", "Where heads look", "cosformer look RUN …")
    note = paragraph(models_note(looked), "origin")
    return section("maps-of-heads", "Where heads look", found, note)


def _writing(sources: Sources, book: Book, charts: list[Chart]) -> str:
    looked, generated = sources.get("looking", ()), _by_machine(sources, "generation", "token_time")
    written = [row for row in looked if row.what == "written"]
    parts = [texts_part(looked, book), paragraph(memory_sentence(looked), "verdict")]
    chart = memory_chart(written, _studies(sources), generated)
    if chart is None:
        return _unmeasured("writing", "What models write", "cosformer look RUN …")
    charts.append(chart)
    parts.append(_figure(chart))
    for rows in generated.values():
        many = any(row.config.get("batch", 1) > 1 for row in rows)
        grid = token_grid(rows) if many else generation_grid(rows)
        parts.append(table(grid._replace(title="Time and memory of one more token"), book))
        parts.append(paragraph(f"By cosformer bench generation. {grid.title}.", "origin"))
    return section("writing", "What models write, and what they must remember", *parts)


def _further(found: Mapping[str, Sequence[str]]) -> str:
    folded = "".join(
        f"<details><summary>{html.escape(heading)}</summary>{''.join(map(from_markdown, texts))}"
        "</details>"
        for heading, texts in found.items()
    )
    return section("further", "Further tables", folded) if folded else ""


def _by_machine(sources: Sources, name: str, what: str) -> dict[str, Sequence[Row]]:
    """Machine -> the rows of a benchmark, where it has measured this quantity."""
    found = {device: sources.get(f"{name}-{device}", ()) for device in MACHINES}
    return {n: rows for n, rows in found.items() if any(row.what == what for row in rows)}


def _studies(sources: Sources) -> dict[str, Sequence[Row]]:
    found = {name: sources.get(name, ()) for name in STUDIES}
    return {n: rows for n, rows in found.items() if any(row.what in UNITS for row in rows)}


def _measured(
    command: str, grids: Sequence[Grid], book: Book, claim: str, rule: str, folded: str = ""
) -> list[str]:
    """Tables, what they say about a claim, what is read on demand, and how they are made."""
    origin = paragraph(f"By cosformer {command}. {rule}", "origin")
    return [*(table(grid, book) for grid in grids), paragraph(claim, "verdict"), folded, origin]


def _figure(chart: Chart) -> str:
    """Where the script draws a chart."""
    title = html.escape(chart["title"])
    return (
        f'<figure class="chart" id="chart-{chart["id"]}"><figcaption>{title}</figcaption></figure>'
    )


def _unmeasured(name: str, title: str, command: str) -> str:
    return section(name, title, paragraph(f"{UNMEASURED.capitalize()}: {command}", "why"))


def _filled(grid: Grid) -> Grid:
    """The table of ours in which empty cells say that nothing was measured."""
    lines = [
        [
            Cell(UNMEASURED)
            if cell.text == MISSING and not cell.rows and line[0].text != "floor"
            else cell
            for cell in line
        ]
        for line in grid.lines
    ]
    return grid._replace(lines=lines)
