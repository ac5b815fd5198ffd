"""Tables of attention as models use it: decays, grouped heads, packed sequences, float16."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cosformer.records import Row
from cosformer.report.cells import both_passes, by_pass, newest, runs
from cosformer.report.selection import LABELS, PASSES, describe, fresh, rows_of, run_with
from cosformer.report.writing import MISSING, Cell, cell_of, markdown, milliseconds

KINDS = {
    "auto": "no decay",
    "chunked": "no decay",
    "decay": "a decay per head",
    "gates": "a decay per token",
}
"""Candidate -> what its line says. On a GPU, where both are measured, `auto` stands for us."""
PEERS = {
    "auto": ("sdpa_cudnn", "fla_cos"),
    "chunked": ("sdpa",),
    "decay": ("fla_retention",),
    "gates": ("fla_simple_gla", "fla_gla"),
}
"""Candidate -> who is shown beside it."""
EXPLANATION = (
    "Each pair is forward / forward + backward. ms: as the caller sees it. Ratio: the time of one "
    "token divided by that of the line named beside it"
)
ON_A_GPU = (
    "; on a GPU without the host. GPU ms: without the host. × floor: GPU ms divided by the time "
    "that a copy of q, k, v, the output and the gates of a decay per token takes (forward + "
    "backward: three such copies)"
)
OF_PEERS = (
    ". Peers, in ms: retention, simple GLA and GLA have a decay but neither the cosine nor the "
    "denominator, and GLA has a gate for every column of a key, which is more than ours computes"
)

SHOWN = {"time", "time_graph", "floor_ratio", "first_call", "step_time_graph", "step_traffic_ratio"}
"""Quantities that the tables tell."""


class Line(NamedTuple):
    """What a line of the table is about."""

    candidate: str
    causal: bool
    dtype: str
    batch: int
    heads: int
    length: int
    width: int
    key_heads: int | None
    packing: str | None


def variant_table(rows: Sequence[Row]) -> str:
    """A line for each cell and decay, then tables of decoding steps and of first calls."""
    rows = fresh(rows)
    on_a_cpu = rows_of(rows, "time")[0].hardware["device"] == "cpu"
    if on_a_cpu:
        rows = run_with(rows, "time")  # on a CPU numbers of two runs do not compare
    rows = [row for row in rows if row.what in SHOWN]
    shown = newest(rows, lambda r: (_line(r), r.config["pass"], r.config.get("cache")))
    about = EXPLANATION if on_a_cpu else EXPLANATION + ON_A_GPU
    if any(row.config["candidate"] in (*PEERS["decay"], *PEERS["gates"]) for row in shown):
        about += OF_PEERS
    parts = [f"{_lines(shown)}\n\n{about}. {_origin(shown)}."]
    if any(row.what == "step_traffic_ratio" for row in shown):
        parts.append(_steps(shown))
    if any(row.what == "first_call" for row in shown):
        parts.append(_first_calls(shown))
    return "\n\n".join(parts)


def _line(row: Row) -> Line:
    fields: dict[str, Any] = {name: row.config.get(name) for name in Line._fields}
    return Line(**fields)


def _lines(rows: Sequence[Row]) -> str:
    quantities = ("time", "time_graph", "floor_ratio")
    times, on_gpu, floors = (by_pass(rows, what, _line) for what in quantities)
    tokens = {_line(row): row.config.get("tokens") for row in rows}
    per_token = {
        (line, name): value * (1 / (tokens[line] or line.batch * line.length))
        for (line, name), value in (on_gpu or times).items()
    }
    measured = dict.fromkeys(line for line, _ in times)
    ours = [name for name in KINDS if name != "chunked" or not on_gpu]
    shown = []
    for line in sorted((line for line in measured if line.candidate in ours), key=_order):
        base, to = _compared(line, measured)
        if base is None and not line.causal:
            continue  # full attention without a decay has a table of its own
        ratios = {
            (line, name): per_token[line, name] / per_token[base, name]
            for name in PASSES
            if base is not None and {(line, name), (base, name)} <= per_token.keys()
        }
        cells = [_spell_kind(line), _spell_cell(line), both_passes(times, line, milliseconds)]
        if on_gpu:
            cells.append(both_passes(on_gpu, line, milliseconds))
            cells.append(both_passes(floors, line, "{:.2f}".format))
        ratio = both_passes(ratios, line, "{:.2f}".format)
        cells.append(f"{ratio} of {to}" if ratios else MISSING)
        shown.append([*cells, _spell_peers(line, times)])
    header = ["attention", "batch × heads × tokens × width", "ms"]
    header += ["GPU ms", "× floor"] if on_gpu else []
    return markdown([*header, "ratio", "peers"], shown)


def _compared(line: Line, among: Collection[Line]) -> tuple[Line | None, str]:
    """The line whose time is the measure of this one, and its name; None where there is none."""
    if line.dtype == "float16":
        return line._replace(dtype="bfloat16"), "bfloat16"
    if line.packing:
        alike = line._replace(packing=None, length=0)
        batches = (other for other in among if other._replace(length=0) == alike)
        return min(batches, key=lambda other: other.length, default=None), "the batch"
    if line.key_heads:
        return line._replace(key_heads=None), f"{line.heads} on {line.heads}"
    if line.candidate not in ("auto", "chunked"):
        if not line.causal:
            return line._replace(causal=True), "causal"
        plain = (line._replace(candidate=name) for name in ("auto", "chunked"))
        return next((other for other in plain if other in among), None), "no decay"
    return None, ""


def _order(line: Line) -> tuple[object, ...]:
    kind = list(KINDS).index(line.candidate)
    special = (line.dtype == "float16", not line.causal, bool(line.packing), bool(line.key_heads))
    return *special, kind, line.width, line.length, line.batch, line.heads


def _spell_kind(line: Line) -> str:
    kind = f"{'causal' if line.causal else 'full'}, {KINDS[line.candidate]}"
    return f"{kind}, {line.dtype}" if line.dtype == "float16" else kind


def _spell_cell(line: Line) -> str:
    batch = f"{line.batch} packed" if line.packing else f"{line.batch}"
    heads = f"{line.heads} on {line.key_heads}" if line.key_heads else f"{line.heads}"
    length = f"16 … {line.length:,}" if line.packing == "drawn" else f"{line.length:,}"
    return f"{batch} × {heads} × {length} × {line.width}"


def _spell_peers(line: Line, times: Mapping[tuple[Line, str], float]) -> str:
    peers = {name: line._replace(candidate=name) for name in PEERS[line.candidate]}
    spelled = {name: both_passes(times, peer, milliseconds) for name, peer in peers.items()}
    found = [f"{LABELS[name]} {pair}" for name, pair in spelled.items() if pair != MISSING]
    return "; ".join(found) or MISSING


def _steps(rows: Sequence[Row]) -> str:
    """One decoding step by batch, without and with a decay per head."""
    steps, lines = [row for row in rows if row.what == "step_traffic_ratio"], []
    header = ["streams", "a step: GPU ms", "× traffic"]
    header += ["with a decay per head: GPU ms", "× traffic"]
    for batch in sorted({row.config["batch"] for row in steps}):
        line, at = [Cell(f"{batch:,}")], {"batch": batch}
        for name in ("step", "step_decay"):
            line.append(cell_of(rows, "step_time_graph", name, at, milliseconds))
            line.append(cell_of(rows, "step_traffic_ratio", name, at, "{:.2f}".format))
        lines.append(line)
    about = "× traffic: the time of a step divided by that of reading and writing the state once"
    if any("states" in row.config for row in rows):
        about += ". A graph steps through many states in turn, more than the cache holds"
    return f"One decoding step:\n\n{markdown(header, lines)}\n\n{about}. {_origin(steps)}."


def _first_calls(rows: Sequence[Row]) -> str:
    """Seconds of the first call of a process."""
    calls = [row for row in rows if row.what == "first_call"]
    found = {(_line(row), row.config["cache"]): row.value for row in calls}
    lines = []
    for line in dict.fromkeys(line for line, _ in found):
        seconds = [found.get((line, cache)) for cache in ("empty", "full")]
        spelled = [MISSING if value is None else f"{value:.2f}" for value in seconds]
        name = f"{KINDS[line.candidate]}, {line.dtype}"
        lines.append([name, _spell_cell(line), *spelled])
    header = ["attention", "batch × heads × tokens × width", "empty cache", "full cache"]
    about = "Seconds, forward + backward; neither imports nor the start of CUDA count"
    title = "The first call of a new process:"
    return f"{title}\n\n{markdown(header, lines)}\n\n{about}. {_origin(calls)}."


def _origin(rows: Sequence[Row]) -> str:
    last = max(rows, key=lambda row: row.date)
    return describe(rows) if last.hardware["device"] == "cpu" else runs(rows)
