"""A study: tables of every entry at its best rate, beside softmax, and curves of the best."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from cosformer.records import Row
from cosformer.report.claims import CLAIMS, Pair, Score, claim_sentence
from cosformer.report.figures import OTHER_COLOURS, draw_grid, figure_bytes
from cosformer.report.selection import (
    device_minutes,
    last_of_each,
    machines,
    origin,
    other_commits,
    rows_of,
)
from cosformer.report.writing import MISSING, Cell, Grid, markdown, mebibytes, spread, told, words

UNITS = {"bits_per_byte": "bits per byte", "bits_per_masked_byte": "bits per masked byte"}
"""Quantity of a study's rows -> how a table calls it."""
TRIAL = ("study", "entry", "probe", "rate", "seed", "steps", "scale", "text")
"""What tells a run of a study from the others."""
COMPARED = "softmax"
"""The entry that others are compared with."""
WINDOW = "local"
"""The mechanism of layers that see a window of tokens exactly, and keep no others."""
PAPER = ("cosformer", "cosformer-1-head", "cosformer-positions", "cosformer-1-head-positions")
"""The entries that are cosFormer as published, with one head or several, with positions or not."""
MODELS = {
    "cosformer": "cosFormer as published",
    "cosformer-multiscale": "cosFormer with a decay per head",
    "cosformer-gated": "cosFormer with a decay per token",
}
"""Mechanisms as a table for newcomers names them."""
LARGER = 1.1
"""How much larger than softmax's a model may be that is compared with it."""
FAR = (1, 2, 4, 8)
"""Positions, in lengths of training, up to which a table tells the loss in long sequences."""
DRAWN = 4
"""Entries that curves are drawn of, the best ones. Softmax is drawn always, and so is the best
entry without exact layers."""


def study_table(rows: Sequence[Row]) -> str:
    """A table for each size, the best entry first; all rates and seeds are in it."""
    return told(study_grids(rows), study_claim(rows), study_rule(rows))


def study_grids(rows: Sequence[Row]) -> list[Grid]:
    """The table of each size, and after it that of losses beyond its length, where rows have it."""
    rows = last_of_each(rows, TRIAL)
    judged, grids = judged_rows(rows), []
    unit = UNITS[judged[0].what]
    for size in sorted(set(map(size_of, judged))):
        mine = [row for row in judged if size_of(row) == size]
        diverged = [row for row in rows if row.what == "diverged" and size_of(row) == size]
        alone = [r for r in rows if r.what == "train_speed" and size_of(r)[:-1] == size[:-1]]
        speeds = {entry_of(row): row for row in alone}
        title = f"{spell_size(mine[0])}, {unit} on validation"
        grids.append(_grid(mine, diverged, speeds)._replace(title=title))
        if (far := _far_grid(mine)).lines:
            span = f"the {size[0]:,} bytes up to a position"
            title = f"The same models on longer sequences, {unit} of {span}"
            grids.append(far._replace(title=title))
    return grids


def study_claim(rows: Sequence[Row]) -> str:
    """What the runs say about the paper's claim, by the protocol that most entries were tried by;
    the best entry without exact layers is told too."""
    judged = of_most(rows)
    unit, best = UNITS[judged[0].what], best_by_entry(judged)
    about = CLAIMS[f"study {judged[0].config['study']}"]
    paper, constant = paper_of(best), best_by_share(best).get(Fraction(0))
    about = about._replace(judged=(Pair(paper),) if paper else about.judged)
    if constant is not None and constant != paper:
        about = about._replace(also=(Pair(constant),))
    lost = [r for r in rows if r.what == "diverged" and size_of(r) == size_of(judged[0])]
    tried = Counter(name for name, _ in {(entry_of(r), r.config["rate"]) for r in [*judged, *lost]})
    most, scores = max(tried.values()), {}
    for name, each in best.items():
        doubt = f"{tried[name]} of {most} rates" if tried[name] < most else ""
        scores[name] = {unit: Score.of([row.value for row in each], doubt)}
    return claim_sentence(about, scores, lower={unit: True})


def study_rule(rows: Sequence[Row]) -> str:
    """What the columns of a study mean, what its runs cost, and where its rows are from."""
    judged = judged_rows(rows)
    newest = max(judged, key=lambda row: row.date)
    c = newest.config
    setting = f"{c['text']}, {c['dtype']}"
    first, last = c["bin"], 2 * c["bin"]
    return (
        "Rates: what the first seed reached; the best of the rates with most seeds is "
        "bold. Mean of seeds: at that rate, with their standard deviation and number. "
        f"First / last: mean over the first {first} and the last {last} "
        f"positions of a sequence. Tokens/s: of training alone on the device; {MISSING}: it ran "
        "beside others. State: of a stream after as many tokens as a sequence has. "
        f"{_cost(rows)}{origin(newest, setting)}{other_commits(newest, judged)}."
    )


def probe_table(rows: Sequence[Row]) -> str:
    """Right answers of every entry on every probe; a table for each number of steps."""
    return told(probe_grids(rows), probe_claim(rows), probe_rule(rows))


def probe_grids(rows: Sequence[Row]) -> list[Grid]:
    """A table of right answers for each number of steps."""
    judged, grids = answered_rows(rows), []
    for steps in sorted({row.config["steps"] for row in judged}):
        found = _answers([row for row in judged if row.config["steps"] == steps])
        grids.append(found._replace(title=f"{steps:,} steps, right answers on test in %"))
    return grids


def probe_claim(rows: Sequence[Row]) -> str:
    """Who answers most in the longest runs; the paper says nothing about it."""
    judged = answered_rows(rows)
    longest = [r for r in judged if r.config["steps"] == max(r.config["steps"] for r in judged)]
    found = _by_probe(longest)
    means = {
        name: 100 * mean_value(row for probe in found.values() for row in probe[name])
        for name in dict.fromkeys(map(entry_of, longest))
        if all(name in probe for probe in found.values())
    }
    if not means:
        return "The paper has no such table; no entry was asked every probe yet."
    best = max(means, key=lambda name: means[name])
    if len(means) == 1:
        return f"The paper has no such table; {best} alone of all entries was asked every probe."
    shown = dict.fromkeys([best, *(name for name in (COMPARED, *PAPER) if name in means)])
    answers = ", ".join(f"{name} {means[name]:.1f} %" for name in shown)
    return (
        "The paper has no such table; right answers in the mean over the "
        f"{len(found)} probes above are: {answers}."
    )


def probe_rule(rows: Sequence[Row]) -> str:
    """How a cell of the probes is made, and where their rows are from."""
    judged = answered_rows(rows)
    newest = max(judged, key=lambda row: row.date)
    rule = (
        "Mean of seeds, with their standard deviation and number, at the rate that is best on "
        f"validation. {MISSING}: no run, none without divergence, or a limit of the mechanism "
        "below that length"
    )
    source = origin(newest, newest.config["dtype"]) + other_commits(newest, judged)
    return f"{rule}. {_cost(rows)}{source}."


def exact_table(rows: Sequence[Row]) -> str:
    """The best entry for every share of exact (softmax) layers, by the protocol that most entries
    were tried by."""
    return _by_share(of_most(rows))


def shares_table(rows: Sequence[Row]) -> str:
    """The best entry for every share of exact layers among models of 12 layers, which can have one
    exact layer in twelve, and how fast they learn."""
    deep = [row for row in judged_rows(rows) if row.config["scale"] == "deep"]
    alone = [r for r in rows if r.what == "train_speed" and r.config["scale"] == "deep"]
    return _by_share(deep, {entry_of(row): row for row in alone}) if deep else ""


def _by_share(judged: Sequence[Row], speeds: Mapping[str, Row] | None = None) -> str:
    """The best entry for every share of exact layers, the best with windows, softmax as it is
    usual, and the paper's cosFormer in its best form. Models that are larger than softmax's by more
    than a tenth are left out.

    `speeds`: rows of entries that were timed alone; None: the table has no speeds.
    """
    best = best_by_entry(judged)
    wanted = {*best_by_share(best).values(), COMPARED, paper_of(best), best_with_windows(best)}
    names = [name for name in best if name in wanted]
    length, far = judged[0].config["length"], max(map(int, judged[0].config["stream_bytes"]))
    header = ["model", "exact layers", UNITS[judged[0].what], "against softmax"]
    header += [f"at {FAR[-1]} × the length", "parameters"]
    header += [f"memory after {n:,} tokens" for n in (length, far)]
    header += [*["tokens/s in training"] * (speeds is not None), "entry"]
    lines = []
    for name in names:
        row, *_ = best[name]
        loss = spread([each.value for each in best[name]], 3)
        size = f"{row.config['parameters'] / 1e6:.2f} M"
        cells = [spell_model(row), _spell_share(row), loss, _beyond(name, best).text]
        cells += [_at_far(best[name], FAR[-1]).text, size]
        cells += [_state(row), _state(row, far)]
        cells += [] if speeds is None else [_speed(row, speeds.get(name)).text]
        lines.append([*cells, f"`{name}`"])
    shown = [row for name in names for row in best[name]]
    newest = max(shown, key=lambda row: row.date)
    rule = (
        f"{spell_size(newest)}, each model at the best of the learning rates that were tried: "
        "mean ± deviation (number of seeds), or one seed. "
        f"At {FAR[-1]} × the length: on the last {1 / Fraction(FAR[-1])} of texts that are "
        f"{FAR[-1]} times as long as those in training. Memory: of a stream, when so many tokens "
        "were generated"
    )
    if speeds is not None:
        rule += f". Tokens/s: alone on the device; {MISSING}: it ran beside others"
    return f"{markdown(header, lines)}\n\n{rule}. {machines(shown)}."


def best_by_share(best: Mapping[str, Sequence[Row]]) -> dict[Fraction, str]:
    """The best entry for every share of exact layers, without those that have windows; much larger
    models than softmax's do not count. `best`: as `best_by_entry` has it."""
    chosen = dict[Fraction, str]()
    for name in _comparable(best):
        if not _share(best[name][0], WINDOW):
            chosen.setdefault(_share(best[name][0], COMPARED), name)
    return chosen


def best_with_windows(best: Mapping[str, Sequence[Row]]) -> str | None:
    """The best entry some of whose layers see a window and none sees all tokens."""
    rows = {name: best[name][0] for name in _comparable(best)}
    found = (n for n, row in rows.items() if _share(row, WINDOW) and not _share(row, COMPARED))
    return next(found, None)


def paper_of(best: Mapping[str, Sequence[Row]]) -> str | None:
    """The best entry that is cosFormer as published."""
    return next((name for name in best if name in PAPER), None)


def _comparable(best: Mapping[str, Sequence[Row]]) -> list[str]:
    """Entries that are not much larger than softmax: those of most seeds first, which are known
    best, and among them the best."""
    compared = best.get(COMPARED)
    most = math.inf if compared is None else LARGER * compared[0].config["parameters"]
    small = [name for name in best if best[name][0].config["parameters"] <= most]
    return sorted(small, key=lambda name: -len(best[name]))  # `best` is in order, and stays so


def study_figure(rows: Sequence[Row], file_format: str, scale: str = "full") -> bytes:
    """Loss in training against tokens, and against seconds of the device for entries that were
    timed alone; loss on validation by position. Of the longest runs of the scale: the best
    entries, softmax, and the best without exact layers."""
    judged = judged_rows(rows)
    size = max(map(size_of, [row for row in judged if row.config["scale"] == scale] or judged))
    longest = [row for row in judged if size_of(row) == size]
    best = sorted((each[0] for each in best_by_entry(longest).values()), key=_loss)
    constant = next((row for row in best if COMPARED not in row.config["mechanism"]), None)
    drawn = [r for n, r in enumerate(best) if n < DRAWN or entry_of(r) == COMPARED or r is constant]
    timed = [row for row in rows if row.what == "train_speed" and size_of(row)[:-1] == size[:-1]]
    alone = {entry_of(r): r.config["tokens_per_second"] for r in drawn if r.config["jobs"] == 1}
    speeds = alone | {entry_of(row): row.value for row in timed}
    scales: dict[str, dict[str, float]] = {"million tokens": {entry_of(row): 1e6 for row in drawn}}
    if any(entry_of(row) in speeds for row in drawn):
        scales["seconds of the device"] = speeds

    def draw(figure: Any) -> None:
        *curves, last = figure.subplots(1, len(scales) + 1, squeeze=False)[0]
        for axis, (title, scale) in zip(curves, scales.items(), strict=True):
            _draw_curves(axis, drawn, scale)
            axis.set_xlabel(title)
            lowest = min(loss for row in drawn for _, loss, _ in row.config["curve"])
            axis.set_ylim(0.97 * lowest, 1.6 * drawn[0].value)
        curves[0].set_ylabel(f"{UNITS[judged[0].what]}, in training")
        _draw_positions(last, drawn)
        last.legend(frameon=False, fontsize=8)

    return figure_bytes(draw, (4.8 * (len(scales) + 1), 3.4), file_format)


def _draw_curves(axis: Any, drawn: Sequence[Row], scale: dict[str, float]) -> None:
    """A curve of each entry; the number of tokens is divided by what `scale` has for it."""
    for row, colour in zip(drawn, OTHER_COLOURS, strict=False):
        name, c = entry_of(row), row.config
        if name in scale:
            along = [step * c["batch"] * c["length"] / scale[name] for step, *_ in c["curve"]]
            axis.plot(along, [loss for _, loss, _ in c["curve"]], color=colour, label=name)
    draw_grid(axis)


def _draw_positions(axis: Any, drawn: Sequence[Row]) -> None:
    """Loss on validation by the position in a sequence: what a longer past is worth."""
    for row, colour in zip(drawn, OTHER_COLOURS, strict=False):
        c = row.config
        along = [(n + 0.5) * c["bin"] for n in range(len(c["by_position"]))]
        axis.plot(along, c["by_position"], color=colour, label=entry_of(row))
    axis.set_xlabel("position")
    axis.set_ylabel(f"{UNITS[drawn[0].what]}, on validation")
    draw_grid(axis)


def mean_value(rows: Iterable[Row]) -> float:
    return statistics.fmean(row.value for row in rows)


def judged_rows(rows: Sequence[Row]) -> list[Row]:
    """The last rows of runs that came to their end; an error if there are none."""
    rows = last_of_each(rows, TRIAL)
    return [row for row in rows if row.what in UNITS] or rows_of(rows, next(iter(UNITS)))


def answered_rows(rows: Sequence[Row]) -> list[Row]:
    """The last rows of probes that were answered to their end; an error if there are none."""
    return rows_of(last_of_each(rows, TRIAL), "accuracy")


def of_most(rows: Sequence[Row]) -> list[Row]:
    """The rows of the protocol that most runs have."""
    judged = judged_rows(rows)
    sizes = Counter(map(size_of, judged))
    return [row for row in judged if size_of(row) == max(sizes, key=lambda size: sizes[size])]


def _grid(judged: Sequence[Row], diverged: Sequence[Row], speeds: dict[str, Row]) -> Grid:
    rates = sorted({row.config["rate"] for row in (*judged, *diverged)})
    best = best_by_entry(judged)
    header = ["entry", *(f"rate {rate:g}" for rate in rates), "mean of seeds", "against softmax"]
    header += ["first / last", "tokens/s", "state", "parameters"]
    lines: list[list[Cell]] = []
    for name, chosen in best.items():
        row = chosen[0]
        lines.append(
            [
                Cell(name),
                *_by_rate([*judged, *diverged], row, rates),
                Cell(spread([row.value for row in chosen], 3), chosen),
                _beyond(name, best),
                Cell(f"{_mean(chosen, 'first')} / {_mean(chosen, 'last')}", chosen),
                _speed(row, speeds.get(name)),
                Cell(_state(row), [row]),
                Cell(f"{row.config['parameters'] / 1e6:.2f} M", [row]),
            ]
        )
    for name in dict.fromkeys(map(entry_of, diverged)):
        if name not in best:
            mine = [row for row in diverged if entry_of(row) == name]
            lines.append([Cell(name), *[Cell("diverged", mine)] * len(rates), *words(*MISSING * 6)])
    return Grid(header, lines)


def _beyond(name: str, best: Mapping[str, Sequence[Row]]) -> Cell:
    """How far the loss of an entry is above that of softmax."""
    if name == COMPARED or COMPARED not in best:
        return Cell(MISSING)
    ours, theirs = best[name], best[COMPARED]
    return Cell(f"{mean_value(ours) - mean_value(theirs):+.3f}", [*ours, *theirs])


def _far_grid(judged: Sequence[Row]) -> Grid:
    """The loss by position beyond the length of training; no lines where no row has it."""
    length = judged[0].config["length"]
    lines = [
        [Cell(name), *(_at_far(rows, n) for n in FAR)]
        for name, rows in best_by_entry(judged).items()
        if any(row.config.get("far") for row in rows)
    ]
    return Grid(["entry", *(f"{n * length:,}" for n in FAR)], lines)


def _at_far(rows: Sequence[Row], times: int) -> Cell:
    """The loss up to so many lengths of training, the mean of the rows that have it."""
    have = [row for row in rows if row.config.get("far")]
    have = [row for row in have if row.config["far"][times - 1] is not None]
    if not have:
        return Cell(MISSING)
    return Cell(f"{statistics.fmean(row.config['far'][times - 1] for row in have):.3f}", have)


def _by_probe(judged: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Probe -> entry -> its rows at its best rate."""
    probes = [probe for _, _, probe in sorted({_probe(row) for row in judged})]
    return {
        probe: best_by_entry([row for row in judged if _probe(row)[-1] == probe])
        for probe in probes
    }


def _answers(judged: Sequence[Row]) -> Grid:
    """Entries by probes, the entry with the most right answers first."""
    columns: dict[str, dict[str, list[tuple[float, Row]]]] = {}
    totals: dict[str, float] = {}
    for of_probe in _by_probe(judged).values():
        for name, rows in of_probe.items():
            totals[name] = totals.get(name, 0.0) + mean_value(rows)
            for row in rows:
                for title, value in _by_length(row):
                    found = columns.setdefault(title, {})
                    if value is not None:
                        found.setdefault(name, []).append((100 * value, row))
    lines = [
        [Cell(name), *(_answered(found.get(name, [])) for found in columns.values())]
        for name in sorted(totals, key=lambda name: -totals[name])
    ]
    return Grid(["entry", *columns], lines)


def _answered(found: Sequence[tuple[float, Row]]) -> Cell:
    if not found:
        return Cell(MISSING)
    return Cell(spread([value for value, _ in found], 1), [row for _, row in found])


def _by_length(row: Row) -> Iterator[tuple[str, float | None]]:
    """Title of a column -> right answers; None: the mechanism has a limit below that length."""
    probe, lengths = row.config["probe"], row.config.get("by_length")
    if lengths is None:
        yield probe, row.value
    else:
        yield from ((f"{probe}, {int(n):,} tokens", value) for n, value in lengths.items())


def _probe(row: Row) -> tuple[str, int, str]:
    """A probe, so that probes of one task are sorted by length."""
    c = row.config
    return c["task"], c["length"], c["probe"]


def size_of(row: Row) -> tuple[int, str, str, str, int]:
    """What runs must share to be compared; the number of steps is last."""
    c = row.config
    return c["length"], c["preset"], c["scale"], c["text"], c["steps"]


def spell_size(row: Row) -> str:
    c = row.config
    layers = c.get("model", {}).get("layers")
    size = c["preset"] if layers is None else f"{c['preset']} with {layers} layers"
    text = "another text" if c["text"] == "another" else c["text"]
    tokens = f"{c['batch']} × {c['length']:,} tokens of {text}"
    return f"{c['steps']:,} steps of {tokens}, preset {size}"


def entry_of(row: Row) -> str:
    return str(row.config["entry"])


def _loss(row: Row) -> float:
    """What is smaller for a better run, on validation."""
    c = row.config
    return -float(c["valid"]) if "valid" in c else row.value


def best_by_entry(judged: Sequence[Row]) -> dict[str, list[Row]]:
    """Entry -> its rows at its best rate, by seed; the best entry first.

    The first seed chooses the rate, among those that most seeds were run at.
    """
    by_rate: dict[str, dict[float, list[Row]]] = {}
    for row in sorted(judged, key=lambda row: row.config["seed"]):
        by_rate.setdefault(entry_of(row), {}).setdefault(row.config["rate"], []).append(row)
    found = {
        name: min(rates.values(), key=lambda rows: (-len(rows), _loss(rows[0])))
        for name, rates in by_rate.items()
    }
    return dict(sorted(found.items(), key=lambda item: statistics.fmean(map(_loss, item[1]))))


def _by_rate(rows: Sequence[Row], best: Row, rates: Sequence[float]) -> Iterator[Cell]:
    """What the first seed reached at each rate; the best is bold."""
    for rate in rates:
        at = {**best.config, "rate": rate}
        names = ("entry", "rate", "seed")
        found = [r for r in rows if all(r.config[name] == at[name] for name in names)]
        if not found:
            yield Cell(MISSING)
        elif found[0].what == "diverged":
            yield Cell("diverged", found[:1])
        else:
            text = f"{found[0].value:.3f}"
            yield Cell(f"**{text}**" if found[0] is best else text, found[:1])


def _mean(rows: Sequence[Row], name: str) -> str:
    return f"{statistics.fmean(row.config[name] for row in rows):.3f}"


def _speed(row: Row, alone: Row | None) -> Cell:
    """Of a run that had the device for itself."""
    if alone is not None:
        return Cell(f"{alone.value:,.0f}", [alone])
    if row.config["jobs"] > 1:
        return Cell(MISSING)
    return Cell(f"{row.config['tokens_per_second']:,.0f}", [row])


def _share(row: Row, mechanism: str) -> Fraction:
    """The share of an entry's layers that have a mechanism."""
    names: list[str] = []
    for part in row.config["mechanism"].split():
        name, _, count = part.partition("*")
        names += [name] * int(count or 1)
    return Fraction(names.count(mechanism), len(names))


def _spell_share(row: Row) -> str:
    """How many layers are exact, and how many see a window, as a table says it."""
    exact, window = _share(row, COMPARED), _share(row, WINDOW)
    some = f"{exact.numerator} of {exact.denominator}"
    said = "none" if not exact else "all" if exact == 1 else some
    if not window:
        return said
    width = row.config["model"].get("options", {}).get(WINDOW, {}).get("window")
    seen = "a window" if width is None else f"the last {width // 2 + 1} tokens"
    return f"{said}; {window.numerator} of {window.denominator} for {seen}"


def spell_model(row: Row) -> str:
    """The mechanisms of a model other than exact ones and windows, and a convolution, in words."""
    names = dict.fromkeys(part.partition("*")[0] for part in row.config["mechanism"].split())
    linear = [name for name in names if name not in (COMPARED, WINDOW)] or [COMPARED]
    said = " and ".join(MODELS.get(name, name) for name in linear)
    if not row.config.get("model", {}).get("conv"):
        return said
    return f"{said} {'and' if ' with ' in said else 'with'} a short convolution"


def _state(row: Row, length: int | None = None) -> str:
    """What a stream remembers; after as many tokens as a sequence of training has by default."""
    found = row.config.get("stream_bytes", {}).get(str(length or row.config["length"]))
    return MISSING if found is None else mebibytes(sum(found.values()))


def _cost(rows: Sequence[Row]) -> str:
    minutes = device_minutes(rows, "train_seconds")
    return f"Training took {minutes}. " if minutes else ""
