"""Tables of training steps, of generated tokens and of generated data."""

from collections.abc import Sequence

from cosformer.records import Row
from cosformer.report.claims import beats_floor, growth_by_name, speed_sentence
from cosformer.report.selection import (
    LABELS,
    Times,
    candidates,
    origin,
    other_commits,
    rows_of,
    run_with,
)
from cosformer.report.writing import Cell, Grid, Spell, cell_of, markdown, mebibytes, milliseconds


def training_table(rows: Sequence[Row]) -> str:
    """Tokens a second by length, mechanisms side by side; the ratio is of steps in turns."""
    made = training_grid(rows).markdown
    return f"{made}\n\n{training_claim(rows)}\n\n{training_rule(rows)}."


def training_grid(rows: Sequence[Row]) -> Grid:
    """The newest run of each way of training, a line for each batch and length."""
    runs = _training_runs(rows)
    run = [row for each in runs.values() for row in each]
    names = candidates(run)
    columns: list[tuple[str, str, Sequence[str], Spell]] = [
        ("tokens/s", "train_speed", names, "{:,.0f}".format),
        ("ratio to", "train_speed_ratio", names[1:], "{:.2f} ×".format),
        ("of peak flops", "flops_utilisation", names, "{:.0%}".format),
        ("memory of a step", "peak_memory", names, mebibytes),
        ("first step, s", "first_step", names, "{:.1f}".format),
        ("data loading", "data_share", names[:1], "{:.2%}".format),
    ]
    shown = [each for each in columns if any(row.what == each[1] for row in run)]
    header = ["batch × tokens"]
    header += [f"{title}: {LABELS.get(n, n)}" for title, _, who, _ in shown for n in who]
    lines = []
    for way, mine in runs.items():
        for batch, length in dict.fromkeys((r.config["batch"], r.config["length"]) for r in mine):
            at = {"batch": batch, "length": length}
            cells = [
                cell_of(mine, what, name, at, spell)
                for _, what, who, spell in shown
                for name in who
            ]
            lines.append([Cell(f"{batch:,} × {length:,}{way}"), *cells])
    return Grid(header, lines, "Training steps of a decoder")


def _training_runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Size of the model and how blocks are computed, as a line tells it -> the run to show of it;
    the newest first."""
    rows_of(rows, "train_speed")  # or an error that there are none
    has_sizes = len({row.config["preset"] for row in rows}) > 1
    ways: dict[str, list[Row]] = {}
    for row in rows:
        c = row.config
        way = "".join(f", {n}d" for n in ("compile", "recompute") if c.get(n))
        ways.setdefault(f", {c['preset']}{way}" if way or has_sizes else "", []).append(row)
    found = {}
    for way, mine in ways.items():
        measured = any(row.what == "train_speed" for row in mine)
        found[way] = run_with(mine, "train_speed" if measured else "failed")
    return dict(sorted(found.items(), key=lambda pair: pair[1][0].date, reverse=True))


def training_claim(rows: Sequence[Row]) -> str:
    """What speeds of training say about linear time."""
    found: Times = {}
    for row in rows_of(run_with(rows, "train_speed"), "train_speed"):
        mine = found.setdefault(row.config["candidate"], {})
        mine[row.config["length"]] = 1 / row.value  # seconds of a token, whatever the batch
    return speed_sentence(found, growth_by_name(found), "cosformer", "softmax")


def training_rule(rows: Sequence[Row]) -> str:
    """What the columns of training steps mean, and where their rows are from."""
    shown = [row for run in _training_runs(rows).values() for row in run]
    row = rows_of(shown, "train_speed")[0]
    sizes = {r.config["preset"]: r.config["parameters"] for r in rows_of(shown, "train_speed")}
    *several, model = [f"{name} of {count / 1e6:,.1f}" for name, count in sizes.items()]
    models = f"decoders {', '.join(several)} and {model}" if several else f"decoder {model}"
    setting = f"{models} million parameters, {row.config['dtype']}"
    return (
        "Forward, backward and AdamW, mechanisms in turns on the same batches. Memory: beyond "
        f"weights and the optimiser's. {origin(row, setting)}"
        f"{other_commits(row, shown)}"
    )


def generation_table(rows: Sequence[Row]) -> str:
    """Time of a token and memory of its stream, a line for each mechanism."""
    grid = generation_grid(rows)
    return f"{grid.markdown}\n\n{grid.title}."


def generation_grid(rows: Sequence[Row]) -> Grid:
    """The newest run, a line for each mechanism."""
    run = run_with(rows, "token_time")
    timed = rows_of(run, "token_time")
    positions = sorted({row.config["position"] for row in timed})
    header = ["mechanism"]
    header += [f"ms per token at {position:,}" for position in positions]
    header += [f"memory of the stream at {position:,}" for position in positions]
    lines = [
        [Cell(LABELS.get(name, name))]
        + [cell_of(run, "token_time", name, {"position": p}, milliseconds) for p in positions]
        + [cell_of(run, "stream_memory", name, {"position": p}, mebibytes) for p in positions]
        for name in candidates(run)
    ]
    setting = f"decoder {timed[0].config['preset']}, {timed[0].config['dtype']}, one stream"
    return Grid(header, lines, origin(timed[0], setting))


def data_table(rows: Sequence[Row]) -> str:
    """Seconds and speed of generated sets."""
    run = run_with(rows, "generation_time")
    lines = []
    for row in rows_of(run, "generation_time"):
        name, samples, workers = (row.config[key] for key in ("set", "samples", "workers"))
        speed = samples / row.value / workers
        lines.append([name, f"{samples:,}", f"{workers}", f"{row.value:,.0f}", f"{speed:,.0f}"])
    header = ["set", "samples", "processes", "seconds", "samples/s for each process"]
    return f"{markdown(header, lines)}\n\n{origin(run[0], f'seed {run[0].seed}')}."


def learning_table(rows: Sequence[Row]) -> str:
    """What short runs learnt, beside what each had to beat: the newest of each kind of run."""
    tested = [row for row in rows if row.what == "floor" and _is_final(row)]
    floors = {
        (row.config["task"], row.config["mechanism"], _options(row), _before(row)): row
        for row in sorted(tested, key=lambda row: row.date)
    }
    if not floors:
        raise ValueError(
            "a run must have rows of 'floor' from the best checkpoint and a whole test split, "
            f"got {sorted({row.what for row in rows})}"
        )
    values, lines = {(row.date, row.what): row.value for row in rows}, []
    for (task, mechanism, options, before), floor in sorted(floors.items()):
        c = floor.config
        found = values[floor.date, floor.unit]
        steps = f"{c['steps']:,} × {c['batch']}"
        said = "yes" if beats_floor(found, floor.value, samples=_samples(floor)) else "no"
        lines.append(
            [", ".join([task, *options, *before]), LABELS.get(mechanism, mechanism), steps,
             floor.unit, f"{found:.3f}", f"{floor.value:.3f} ({c['by']})", said]
        )  # fmt: skip
    header = ["task", "mechanism", "best step × batch", "metric", "test", "to beat", "beaten"]
    rule = "Beaten: an accuracy by two standard errors where the number of samples is in the row"
    shown = sorted(floors.values(), key=lambda row: row.date, reverse=True)
    source = origin(shown[0], "one seed") + other_commits(shown[0], shown)
    return f"{markdown(header, lines)}\n\n{rule}. {source}."


def _is_final(row: Row) -> bool:
    """Whether a best checkpoint was judged by a whole test split; rows that do not say were."""
    c = row.config
    is_whole = c.get("split_size") in (None, c.get("samples"))
    return c.get("split") == "test" and c.get("checkpoint", "best") == "best" and is_whole


def _options(row: Row) -> tuple[str, ...]:
    """Whole numbers among the options of a task, such as its length; the seed is left out."""
    given = sorted(row.config.get("options", {}).items())
    counted = [(name, value) for name, value in given if isinstance(value, int) and value]
    return tuple(f"{name} {value}" for name, value in counted if name not in ("seed", "workers"))


def _before(row: Row) -> tuple[str, ...]:
    """What a run had learnt before the task."""
    start, pretrained = row.config.get("start"), row.config.get("pretraining")
    return (*([f"from {start}"] if start else []), *(["pre-trained"] if pretrained else []))


def _samples(floor: Row) -> int | None:
    """How many samples an accuracy was measured on, 0 where the row does not say; None: a loss."""
    if floor.unit != "accuracy":
        return None
    c = floor.config
    return int(c.get("samples") or c.get("options", {}).get("sizes", [0, 0, 0])[2])
