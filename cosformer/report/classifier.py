"""The paper's table of speed, measured anew: a text classifier with every mechanism, by length."""

from collections.abc import Sequence

from cosformer.records import Row
from cosformer.report.claims import SHORTEST, growth_by_name, speed_sentence
from cosformer.report.selection import Times, candidates, origin, other_commits
from cosformer.report.writing import (
    MISSING,
    Cell,
    Grid,
    Spell,
    cell_of,
    mebibytes,
    milliseconds,
    told,
    words,
)

OURS, THEIRS = "cosformer", "softmax"
PUBLISHED_AT = tuple(SHORTEST * count for count in (1, 2, 3, 4))
PUBLISHED = {
    "softmax": ("6.95", "2.23", "out of memory", "out of memory"),
    "linear": ("11.86", "5.54", "3.53", "2.56"),
    "performer": ("14.0", "6.5", "4.1", "2.9"),
    "linformer": ("14.8", "7.1", "4.5", "3.2"),
    "reformer": ("11.6", "5.0", "2.9", "2.0"),
    "bigbird": ("6.5", "3.2", "2.1", "1.5"),
    "cosformer": ("12.27", "5.72", "3.62", "2.64"),
}
"""Mechanism -> training steps a second at these lengths (Qin et al. 2022)."""
REMARKS = (
    "Forward, backward and AdamW, or the forward pass alone, of one classifier of bytes around "
    "every mechanism: sinusoidal positions, no convolution, steps neither compiled nor recorded as "
    "CUDA graphs. Mechanisms take turns, five at a time, on stretches of one text, none of them "
    "padded. Memory: beyond weights and the optimiser's. Lines in italics are those of the paper, "
    "on one A6000, with a softmax that is not fused and a batch that is the same at every length: "
    "steps of other sizes, so that only ratios can be compared"
)


def classifier_table(rows: Sequence[Row]) -> str:
    """Speed and memory of every mechanism by length, a block for each machine."""
    return "\n\n".join(
        told(
            classifier_grids(mine),
            classifier_claim(mine),
            classifier_limits(mine),
            classifier_rule(mine),
        )
        for mine in machines(rows)
    )


def machines(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each machine, those of GPUs first: the last of every quantity and place.

    Toys are shown only where there is nothing else.
    """
    known = [row for row in rows if row.config.get("table") == "speed"]
    if not known:
        kinds = sorted({row.what for row in rows})
        raise ValueError(f"a run must have rows of the table speed, got {kinds}")
    known = [row for row in known if row.config["size"] == "full"] or known
    names = dict.fromkeys(
        str(row.hardware["name"])
        for row in sorted(known, key=lambda r: r.hardware["device"] != "cuda")
    )
    return [_last([row for row in known if row.hardware["name"] == name]) for name in names]


def classifier_grids(rows: Sequence[Row]) -> list[Grid]:
    """Training, inference and memory, a line for each mechanism."""
    return [
        _grid(rows, "Training, steps a second", "speed", "training", milliseconds),
        _grid(rows, "Inference, steps a second", "speed", "inference", milliseconds),
        _grid(rows, "Memory of a training step", "peak_memory", "training", mebibytes),
    ]


def classifier_claim(rows: Sequence[Row]) -> str:
    """What the speed of training says about the paper's claim, and how it compares by length."""
    tokens = Times()
    for row in rows:
        c = row.config
        if row.what == "speed" and c["pass"] == "training":
            seconds = 1 / (row.value * c["batch"] * c["length"])
            tokens.setdefault(c["candidate"], {})[c["length"]] = seconds
    said = speed_sentence(tokens, growth_by_name(tokens), OURS, THEIRS)
    ours, theirs = tokens.get(OURS, {}), tokens.get(THEIRS, {})
    ratios = [f"{theirs[n] / ours[n]:.2f} × at {n:,}" for n in sorted(ours.keys() & theirs.keys())]
    if ratios:
        said += f" Training steps of {OURS} for one of {THEIRS}, by tokens: {', '.join(ratios)}."
    is_toy = any(row.config["size"] != "full" for row in rows)
    return ("A toy size, whose numbers mean nothing. " if is_toy else "") + said


def classifier_limits(rows: Sequence[Row]) -> list[str]:
    """Why places of the table have no number, a line for each mechanism and reason."""
    found = dict[tuple[str, str], dict[str, list[int]]]()
    for row in rows:
        if row.what == "failed":
            c = row.config
            places = found.setdefault((c["candidate"], c["reason"]), {})
            places.setdefault(c["pass"], []).append(c["length"])
    return [
        f"{name}, {'; '.join(_place(*each) for each in places.items())}: {reason}"
        for (name, reason), places in found.items()
    ]


def classifier_rule(rows: Sequence[Row]) -> str:
    """What the numbers mean, how long they took, and where they are from."""
    shown = [row for row in rows if "model" in row.config]
    newest = max(shown, key=lambda row: row.date)
    m = newest.config["model"]
    model = f"{m['layers']} layers of {m['width']}, {m['heads']} heads, {m['hidden']} inside"
    minutes = sum(row.value for row in rows if row.what == "spent") / 60
    took = f" All of it took {minutes:.1f} minutes of the device." if minutes else ""
    source = origin(newest, f"{model}, {newest.config['dtype']}") + other_commits(newest, shown)
    return f"{REMARKS}.{took} {source}."


def _last(rows: Sequence[Row]) -> list[Row]:
    """The last row of every quantity and place; a failure gives way to a number and the reverse."""
    found = dict[tuple[object, ...], Row]()
    for row in rows:
        c = row.config
        place = (c.get("candidate"), c.get("pass"), c.get("length"))
        if row.what == "spent":  # of every run
            found[row.what, row.date] = row
            continue
        if row.what == "failed":
            found = {key: each for key, each in found.items() if key[1:] != place}
        else:
            found.pop(("failed", *place), None)
        found[row.what, *place] = row
    return list(found.values())


def _grid(rows: Sequence[Row], title: str, what: str, pass_name: str, spell: Spell) -> Grid:
    measured = [row for row in rows if "candidate" in row.config]
    lengths = {row.config["length"]: row.config["batch"] for row in measured}
    header = ["mechanism", *(f"{lengths[n]:,} × {n:,} tokens" for n in sorted(lengths))]
    is_published = (what, pass_name) == ("speed", "training") and set(PUBLISHED_AT) & set(lengths)
    lines = list[Sequence[Cell]]()
    for name in candidates(measured):
        at = [{"pass": pass_name, "length": length} for length in sorted(lengths)]
        lines.append([Cell(name), *(cell_of(measured, what, name, each, spell) for each in at)])
        if is_published and name in PUBLISHED:
            theirs = dict(zip(PUBLISHED_AT, PUBLISHED[name], strict=True))
            values = [f"*{theirs.get(length, MISSING)}*" for length in sorted(lengths)]
            lines.append(words("*Qin et al. 2022*", *values))
    return Grid(header, lines, title)


def _place(pass_name: str, lengths: Sequence[int]) -> str:
    counted = ", ".join(f"{length:,}" for length in sorted(lengths))
    return f"{pass_name} at {counted} tokens"
