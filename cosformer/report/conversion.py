"""Tables of pretrained models that were converted: what they keep, and how fast they embed."""

from collections.abc import Sequence

from cosformer.records import Row
from cosformer.report.selection import LABELS, candidates, origin, rows_of, run_with
from cosformer.report.writing import MISSING, markdown

STAGES = {"replaced": "no training", "matched": "layers matched", "distilled": "then distilled"}

SPELT = {
    "embedding_speed": ("tokens/s", "{:,.0f}"),
    "embedding_speed_ratio": ("ratio", "{:.2f} ×"),
    "agreement": ("cosine with the original", "{:.3f}"),
}
"""Quantity -> its name in the header, and how its numbers are written."""


def conversion_table(rows: Sequence[Row]) -> str:
    """Spearman's correlation by stage, a line for each conversion; the original's comes first."""
    run = run_with(rows, "spearman")
    judged = rows_of(run, "spearman")
    found = {(row.config["candidate"], row.config["stage"]): row for row in judged}
    first = next(row for row in judged if row.config["stage"] == "original")
    minutes = {r.config["candidate"]: r.value for r in run if r.what == "conversion_time"}
    lines = [[f"{_name(first)}, the original", "all", f"{first.value:.4f}"]]
    lines[0] += [*[MISSING] * (len(STAGES) - 1), "100.0 %", MISSING]
    header = ["attention", "softmax layers", *STAGES.values(), "kept", "minutes"]
    for candidate in dict.fromkeys(name for name, stage in found if stage != "original"):
        values = [found.get((candidate, stage)) for stage in STAGES]
        last = [row for row in values if row is not None][-1]  # of a killed run, an earlier stage
        exact = ", ".join(str(number) for number in last.config["exact"]) or "none"
        kept = took = MISSING
        if candidate in minutes:
            kept = f"{last.value / first.value:.1%}".replace("%", " %")
            took = f"{minutes[candidate]:.1f}"
        spelt = [MISSING if row is None else f"{row.value:.4f}" for row in values]
        lines.append([_name(last), exact, *spelt, kept, took])
    c = first.config
    setting = (
        f"{c['model']}, STS-B {c['split']} ({c['pairs']:,} pairs); learnt from {c['texts']:,} "
        f"texts without labels, {c['match_steps']:,} + {c['distil_steps']:,} steps of "
        f"{c['batch']} of them, seed {first.seed}"
    )
    return (
        f"{markdown(header, lines)}\n\nSpearman's correlation. Layers are counted from 0. Kept: of "
        f"the original's, after both stages. {origin(first, setting)}."
    )


def embedding_table(rows: Sequence[Row]) -> str:
    """Tokens a second of embeddings by length, and how many times as many as the original's."""
    run = run_with(rows, "embedding_speed")
    timed = rows_of(run, "embedding_speed")
    names = candidates(timed)
    at = {
        (r.what, r.config["candidate"], r.config["length"]): r for r in run if "length" in r.config
    }
    shown = [("embedding_speed", name) for name in names]
    shown += [(what, name) for what in ("embedding_speed_ratio", "agreement") for name in names[1:]]
    lengths = sorted({length for _, _, length in at if ("embedding_speed", names[0], length) in at})
    header = ["tokens of a text"] + [
        f"{SPELT[what][0]}: {LABELS.get(name, name)}" for what, name in shown
    ]
    lines = [
        [f"{length:,}"]
        + [
            SPELT[what][1].format(at[what, name, length].value)
            if (what, name, length) in at
            else MISSING
            for what, name in shown
        ]
        for length in lengths
    ]
    first, c = timed[0], timed[0].config
    setting = f"{c['model']} of all layers converted beside the original, {c['dtype']}"
    return (
        f"{markdown(header, lines)}\n\nBatches have the same number of tokens at every length. "
        "Cosine: between the embeddings of either model, its mean over texts that neither learnt "
        "from, as long as the original has positions. Positions past the model's own are its first "
        f"ones again. {origin(first, setting)}."
    )


def _name(row: Row) -> str:
    mechanism: str = row.config["candidate"].partition(" ")[0]
    return LABELS.get(mechanism, mechanism)
