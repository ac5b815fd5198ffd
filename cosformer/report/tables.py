"""Markdown tables of measured rows; `TABLES` names them."""

from collections.abc import Callable, Sequence

from cosformer.records import Row
from cosformer.report.cells import cell_table
from cosformer.report.classifier import classifier_table
from cosformer.report.conversion import conversion_table, embedding_table
from cosformer.report.generation import token_table
from cosformer.report.mechanisms import mechanism_table
from cosformer.report.reproduce import reproduced_table
from cosformer.report.selection import (
    LABELS,
    PASSES,
    candidates,
    crossover_sentence,
    describe,
    is_of_cells,
    label,
    plain,
    rows_of,
    run_with,
    times,
)
from cosformer.report.speed import speed_table
from cosformer.report.study import exact_table, probe_table, shares_table, study_table
from cosformer.report.training import data_table, generation_table, learning_table, training_table
from cosformer.report.variants import variant_table
from cosformer.report.writing import MISSING, markdown, milliseconds


def time_table(rows: Sequence[Row]) -> str:
    """Milliseconds by length, candidates side by side, with ratios measured in the same run.

    By cell where more than the length differs. Only calls of a fresh install count.
    """
    rows = plain(rows)
    run = run_with(rows, "time")
    if is_of_cells(run):
        return cell_table(rows)
    ratios = {
        (row.config["pass"], row.config["candidate"], row.config["length"]): row.value
        for row in run
        if row.what == "time_ratio"
    }
    header, columns = ["tokens"], []
    for pass_name, title in PASSES.items():
        for candidate, by_length in times(run, pass_name).items():
            header.append(f"{title}: {LABELS.get(candidate, candidate)}")
            columns.append({n: milliseconds(value) for n, value in by_length.items()})
            ratio = {
                n: f"{value:.2f} ×" if value < 10 else f"{value:.1f} ×"
                for (p, c, n), value in ratios.items()
                if (p, c) == (pass_name, candidate)
            }
            if ratio:
                header.append("ratio")
                columns.append(ratio)
    lengths = sorted({length for column in columns for length in column})
    lines = [[f"{n:,}", *(column.get(n, MISSING) for column in columns)] for n in lengths]
    return f"{markdown(header, lines)}\n\nMilliseconds. {describe(run)}."


def summary_table(rows: Sequence[Row]) -> str:
    """The numbers that are not a function of length, one per line."""
    run = run_with(plain(rows), "peak_memory")
    longest = max(row.config["length"] for row in rows_of(run, "peak_memory"))
    among, lines = candidates(run), []
    for row in run:
        c = row.config
        if row.what in ("growth_exponent", "peak_memory"):
            whose = f"{label(c['candidate'], among)}, {PASSES[c['pass']]}"
        if row.what == "growth_exponent":
            name = f"growth of time: {whose}, {c['from']:,} to {c['to']:,} tokens"
            lines.append([name, f"length^{row.value:.2f}"])
        elif row.what == "peak_memory" and c["length"] == longest:
            name = f"peak extra memory: {whose}, {longest:,} tokens"
            lines.append([name, f"{row.value:.2f} × (q + k + v)"])
        elif row.what == "step_time":
            lines.append([f"one decoding step at position {c['position']:,}", _spell(row)])
        elif row.what == "step_memory":
            lines.append([f"its memory, state included, at {c['position']:,}", _spell(row)])
        elif row.what == "step_memory_growth":
            lines.append([f"its growth from {c['from']:,} to {c['to']:,}", _spell(row)])
    return f"{markdown(['quantity', 'measured'], lines)}\n\n{describe(run)}."


def crossover_list(rows: Sequence[Row]) -> str:
    """Where the op overtakes softmax attention, one line for each pass."""
    run = run_with(rows, "time")
    return "\n".join(
        f"* {title}: {crossover_sentence(times(run, pass_name))}."
        for pass_name, title in PASSES.items()
        if times(run, pass_name)
    )


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "speed": speed_table,
    "time": time_table,
    "summary": summary_table,
    "crossover": crossover_list,
    "variants": variant_table,
    "mechanisms": mechanism_table,
    "training": training_table,
    "generation": generation_table,
    "tokens": token_table,
    "data": data_table,
    "learning": learning_table,
    "study": study_table,
    "exact": exact_table,
    "shares": shares_table,
    "probes": probe_table,
    "reproduced": reproduced_table,
    "conversion": conversion_table,
    "embedding": embedding_table,
    "classifier": classifier_table,
}


def _spell(row: Row) -> str:
    if row.unit == "bytes":
        return f"{row.value / 1024:,.0f} KiB" if row.value else "0 bytes"
    return f"{row.value:.3g} {row.unit}"
