"""Tables and figures say what the rows say."""

import dataclasses
import functools
import re

import pytest
from row_cases import RUN, cells, changed

from cosformer.report import selection, tables
from cosformer.report.figures import time_vs_length, token_time_vs_length
from cosformer.report.training import training_table


def test_the_time_table_has_a_line_per_length_and_a_dash_for_what_was_not_measured(rows):
    header, _, *lines = cells(tables.time_table(rows))
    assert header[:4] == ["tokens", "forward: cosFormer", "forward: softmax (SDPA)", "ratio"]
    assert lines == [
        ["256", "1", "0.25", "0.25 ×", "3", "0.75", "0.25 ×"],
        ["1,024", "4", "4", "1.00 ×", "12", "12", "1.00 ×"],
        ["4,096", "16", "–", "–", "48", "–", "–"],
    ]


def test_the_summary_names_each_candidate_at_the_longest_length(rows):
    ours = [row for row in rows if row.what in ("peak_memory", "growth_exponent")]
    theirs = [changed(row, value=7, candidate="sdpa") for row in ours]
    table = tables.summary_table([*rows, *theirs])
    lines = dict(cells(table))
    assert len([name for name in lines if "peak" in name]) == 4  # two candidates, two passes
    for name, value in (("cosFormer", "1.50"), ("softmax (SDPA)", "7.00")):
        at = f"peak extra memory: {name}, forward, 4,096 tokens"
        assert lines[at] == f"{value} × (q + k + v)"
    assert lines["growth of time: cosFormer, forward, 256 to 4,096 tokens"] == "length^1.00"
    for made in (table, tables.time_table(rows)):
        for word in ("Test processor", "2 threads", "float32", "causal", "2.13.0", "0123456789ab"):
            assert word in made


def test_neither_an_older_run_nor_a_newer_part_displaces_a_whole_run(rows):
    dates = ("2025", "2999")
    older, newer = ([changed(row, value=9e9, date=date) for row in rows] for date in dates)
    part = [row for row in newer if row.config.get("length") == 1024]
    assert tables.time_table([*older, *rows, *part]) == tables.time_table(rows)


@pytest.mark.parametrize(("missing", "shown"), [(1, "2999"), (2, "2026")])
def test_a_run_that_skipped_a_twentieth_is_whole(rows, missing, shown):
    time = next(row for row in rows if row.what == "time")
    old = [changed(time, length=n) for n in range(1, 21)]
    new = [dataclasses.replace(row, date="2999-01-01T00:00:00+00:00") for row in old[missing:]]
    assert {row.date[:4] for row in selection.run_with(old + new, "time")} == {shown}


def test_a_run_without_the_rows_a_table_needs_is_an_error(rows):
    steps = [row for row in rows if row.what == "step_time"]
    for make in tables.TABLES.values():
        with pytest.raises(ValueError, match=r"a run must have rows of .*got \['step_time'\]"):
            make(steps)


CROSSOVERS = [
    ({1: 2.0, 100: 2.0}, {1: 1.0, 100: 4.0}, 10.0),  # halfway in log-log
    ({1: 1.0, 100: 1.0}, {1: 2.0, 100: 4.0}, 0.0),
    ({1: 1.0, 100: 5.0}, {1: 2.0, 100: 4.0}, None),
    ({1: 1.0, 4: 3.0, 16: 1.0}, {1: 2.0, 4: 1.5, 16: 2.0}, 8.0),  # the last crossing counts
    ({1: 2.0, 100: 2.0, 1000: 2.0}, {1: 1.0, 100: 4.0}, 10.0),  # common lengths only
    ({1: 1.0}, {2: 1.0}, None),
]


@pytest.mark.parametrize(("ours", "theirs", "length"), CROSSOVERS)
def test_crossover_is_where_ours_stays_faster(ours, theirs, length):
    found = selection.crossover(ours, theirs)
    assert found == (None if length is None else pytest.approx(length))


def test_the_crossover_is_told_in_words(rows):
    slow = {"chunked": {256: 2.0}, "sdpa": {256: 1.0}}
    fast = {"chunked": {256: 1.0}, "sdpa": {256: 2.0}}
    both = {"chunked": {1000: 2.0, 4000: 2.0}, "sdpa": {1000: 1.0, 4000: 4.0}}
    sentence = selection.crossover_sentence
    assert sentence(slow) == "cosFormer is not faster than softmax (SDPA) up to 256 tokens"
    assert sentence(fast).endswith("faster than softmax (SDPA) at every length from 256 tokens on")
    assert sentence(both).endswith("from about 2,000 tokens on")
    assert len(tables.crossover_list(rows).splitlines()) == 2


@pytest.mark.parametrize("draw", [time_vs_length, token_time_vs_length])
def test_a_figure_needs_times_is_the_same_for_the_same_rows_and_bears_no_date(gpu_rows, draw):
    few = [row for row in gpu_rows if row.config.get("pass") == "forward"]
    drawn = draw(few, "svg")
    assert drawn == draw(few, "svg")
    assert drawn.startswith(b"<?xml")
    assert b"dc:date" not in drawn
    with pytest.raises(ValueError, match="must have rows of 'time'"):
        draw([row for row in few if row.what != "time"], "svg")


def test_cells_have_a_table_for_causal_and_one_for_full_attention(gpu_rows):
    causal, full = tables.time_table(gpu_rows).split("Full attention:")
    header, _, *lines = cells(causal)
    assert header[1:] == ["cosFormer", "× floor", "cosFormer, no kernels", "cosFormer on fla"]
    assert lines == [
        ["8 × 16 × 1,024 × 64", "0.125 / 0.375", "2.5 / 2.5", "1.25 / 3.75", "0.5 / 1.5"],
        ["1 × 16 × 65,536 × 64", "1 / 3", "2.5 / 2.5", "10 / 30", "–"],
        ["2 × 8 × 4,096 × 128", "0.125 / 0.375", "2.5 / 2.5", "1.25 / 3.75", "0.5 / 1.5"],
    ]
    header, _, *lines = cells(full)
    assert header[1:] == ["cosFormer", "× floor", "cosFormer, no kernels"]
    assert len(lines) == 3
    said = selection.describe(gpu_rows)  # no one shape
    assert said.startswith("Test GPU; bfloat16; median of 9; torch 2.11.0, commit unknown")
    gone = [r for r in gpu_rows if r.config.get("pass") != "forward_backward" or r.what != "time"]
    assert cells(tables.time_table(gone))[2][1] == "0.125 / –"  # a pass that failed


def test_a_number_measured_again_displaces_itself_alone(gpu_rows):
    def later(row, date, commit):
        return dataclasses.replace(row, value=2 * row.value, date=date, commit=commit)

    again = [row for row in gpu_rows if row.config.get("length") == 1024]
    part = [row for row in gpu_rows if row.config.get("candidate") == "auto"]
    rows = [*gpu_rows, *(later(row, "2026-01-03", "newer") for row in again)]
    rows += [later(row, "2026-01-04", "part") for row in part]
    lines = cells(tables.time_table(rows).split("Full")[0])[2:]
    assert [line[1] for line in lines] == ["0.25 / 0.75", "2 / 6", "0.25 / 0.75"]  # the last run's
    assert [line[3] for line in lines] == ["2.5 / 7.5", "10 / 30", "1.25 / 3.75"]
    said = tables.time_table(rows).rpartition("commits ")[2]
    assert said.index("part") < said.index("newer") < said.index("unknown")


def test_cells_compare_by_time_per_token(gpu_rows):
    found = selection.token_times(gpu_rows, "forward")
    per_token = 1e6 / 2**16
    assert found["auto"] == {1024: per_token, 65536: per_token}  # not the cell of other width
    assert found["fla_cos"] == {1024: 4 * per_token}


def test_calls_replayed_in_c_are_not_shown(gpu_rows):
    new = {"date": "2999", "versions": {"torch": "", "host": "C++"}}
    replayed = [changed(row, value=row.value / 5, **new) for row in gpu_rows]
    for make in (tables.time_table, tables.speed_table):
        assert make(_with_softmax(gpu_rows + replayed)) == make(_with_softmax(gpu_rows))


def _with_softmax(rows):
    """The same and softmax, by two backends, at 1,024 tokens: 3 and 2 times as slow as ours."""
    ours = [row for row in rows if row.what == "time" and row.config["candidate"] == "auto"]
    return rows + [
        changed(row, value=factor * row.value, candidate=name)
        for row in ours
        if row.config["length"] == 1024
        for name, factor in (("sdpa_flash", 3), ("sdpa_cudnn", 2))
    ]


def test_speed_is_told_of_every_machine_beside_its_fastest_softmax(rows, gpu_rows):
    gpu = _with_softmax(gpu_rows)
    _, _, *lines = cells(tables.speed_table(rows + gpu))
    gpu_at = ("Test GPU, bfloat16", "8 × 16 × 1,024 × 64")
    assert lines == [
        ["CPU, 2 threads, float32", "1 × 8 × 256 × 64", "0.25", "1", "0.2 ×", "0.75", "3", "0.2 ×"],
        ["CPU, 2 threads, float32", "1 × 8 × 1,024 × 64", "4", "4", "1.0 ×", "12", "12", "1.0 ×"],
        [*gpu_at, "0.25", "0.125", "2.0 ×", "0.75", "0.375", "2.0 ×"],
    ]
    newer = [dataclasses.replace(row, value=8 * row.value, date="2999") for row in gpu]
    alone = [row for row in newer if row.config["candidate"] == "auto"]  # nothing to compare with
    assert tables.speed_table(rows + gpu + alone) == tables.speed_table(rows + gpu)
    assert cells(tables.speed_table(rows + gpu + newer))[-1][2:5] == ["2", "1", "2.0 ×"]
    said = tables.speed_table(rows + gpu + newer).rpartition("PyTorch has. ")[2]
    day = rows[0].date[:10]
    assert re.fullmatch(rf".+, torch .+; Test GPU, torch 2.11.0; {day} to 2999\.", said)


def _learnt(like, task, metric, value, floor, day, mechanism="cosformer", **more):
    """The rows of an evaluation on that day: its metric, and what it had to beat."""
    config = {"task": task, "mechanism": mechanism, "steps": 2000, "batch": 8, "by": "chance"}
    config |= {"split": "test", "options": {"text": "python", "length": 64}} | more
    date = f"2026-01-{day:02}T00:00:00+00:00"
    like = dataclasses.replace(like, unit=metric, config=config, date=date)
    found = {metric: value, "floor": floor}
    return [dataclasses.replace(like, what=what, value=x) for what, x in found.items()]


def test_what_was_learnt_stands_beside_what_had_to_be_beaten(rows):
    learnt = functools.partial(_learnt, rows[0])
    found = learnt("lm", "loss", 9.0, 3.0, 1) + learnt("lm", "loss", 2.0, 3.0, 2)
    found += learnt("image", "accuracy", 0.05, 0.1, 3)
    _, _, *shown = cells(tables.learning_table(found))
    assert [line[-1] for line in shown] == ["no", "yes"]  # image, and the newer run of lm
    assert shown[1][:5] == ["lm, length 64", "cosFormer", "2,000 × 8", "loss", "2.000"]
    assert tables.learning_table(found + found) == tables.learning_table(found)
    found += learnt("lm", "loss", 1.0, 3.0, 4, "softmax")
    values = [line[4] for line in cells(tables.learning_table(found))[2:]]
    assert values == ["0.050", "2.000", "1.000"]
    found += learnt("lm", "loss", 0.5, 3.0, 5, "softmax", start="mlm", pretraining=True)
    found += learnt("lm", "loss", 0.1, 3.0, 6, "softmax", split="valid")
    last = cells(tables.learning_table(found))[-1]
    assert (last[0], last[4]) == ("lm, length 64, from mlm, pre-trained", "0.500")
    guesses = [  # two standard errors of 2,500 guesses are 0.02
        learnt("image", "accuracy", value, 0.5, 5 + n, **known)
        for n, known in enumerate(({"samples": 2500}, {"options": {"sizes": [9, 9, 2500]}}))
        for value in (0.519, 0.521)
    ]
    said = [cells(tables.learning_table(each))[2][-1] for each in guesses]
    assert said == ["no", "yes"] * 2


@pytest.mark.parametrize("part", [{"checkpoint": "last"}, {"samples": 8, "split_size": 100}])
def test_a_part_of_the_split_or_another_checkpoint_displaces_no_whole(rows, part):
    old = _learnt(rows[0], "lm", "loss", 2.0, 3.0, 1)
    partial = _learnt(rows[0], "lm", "loss", 1.0, 3.0, 2, **part)
    assert tables.learning_table(old + partial) == tables.learning_table(old)
    with pytest.raises(ValueError, match="from the best checkpoint and a whole test split"):
        tables.learning_table(partial)
    whole = {"checkpoint": "best", "samples": 100, "split_size": 100}
    newer = _learnt(rows[0], "lm", "loss", 1.5, 3.0, 3, **whole)
    assert cells(tables.learning_table(old + newer + partial))[-1][4] == "1.500"


def _of_mechanisms(row, device, batch=1, **changes):
    config = {"batch": batch, "heads": 2, "width": 64, "dtype": "bfloat16", "causal": True}
    hardware = {"device": device, "name": "Test"}
    return dataclasses.replace(row, config=config, hardware=hardware, **changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_measures_mechanisms_in_several_runs(rows, device):
    def run(day, batch, value, **lengths):
        at = {"date": f"2026-01-{day:02}T00:00:00+00:00", "commit": f"run{day}"}
        like = _of_mechanisms(rows[0], device, batch=batch, value=value, **at)
        return [
            changed(like, {"pass": pass_name}, candidate=name, length=length)
            for name, measured in lengths.items()
            for length in measured
            for pass_name in ("forward", "forward_backward")
        ]

    found = run(1, 1, 1.0, cosformer=[64, 128], relu=[64, 128], softmax=[64, 128])
    found += run(2, 1, 2.0, relu=[128], local=[64, 128])  # a part of relu, and one more
    found += run(3, 8, 3.0, cosformer=[64, 128])  # of other tensors
    table = tables.mechanism_table(found)
    values = {line[0]: line[3] for line in cells(table)[2:]}
    whole = dict.fromkeys(("cosformer", "relu", "softmax"), "1")
    assert values == (whole if device == "cpu" else whole | {"local": "2"})
    assert ("other lines: commit run2" in table) == (device == "cuda")


def test_growth_on_a_gpu_is_that_without_the_host(rows):
    at = {"candidate": "cosformer", "pass": "forward_backward"}
    like = changed(_of_mechanisms(rows[0], "cuda"), at)

    def row(what, value, **more):
        return changed(like, more, what=what, value=value)

    found = [row("time", 1.0, length=n) for n in (1024, 4096, 8192)]
    found += [row("growth_exponent", 0.0, **{"from": 4096, "to": 8192})]
    assert cells(tables.mechanism_table(found))[-1][1] == "0.00"
    alone = [row("time_graph", n / 4096, length=n) for n in (4096, 8192)]
    found += [row("time_graph", 0.9, length=1024), *alone]
    assert cells(tables.mechanism_table(found))[-1][1] == "1.00"


def test_compiled_steps_stand_beside_others_and_displace_none():
    at = {"preset": "tiny", "dtype": "any", "parameters": 10, "batch": 2, "candidate": "cosformer"}
    later = dataclasses.replace(RUN, date="2027-01-01T00:00:00+00:00")
    rows = [
        run.row("train_speed", speed, "tokens/s", length=length, **at, **way)
        for run, speed, length, way in (
            (RUN, 11.0, 64, {"compile": False}),
            (RUN, 12.0, 128, {"compile": False}),
            (later, 22.0, 64, {"compile": True, "recompute": True}),
        )
    ]
    lines = [
        ["2 × 64, tiny, compiled, recomputed", "22"],
        ["2 × 64", "11"],
        ["2 × 128", "12"],
    ]
    assert cells(training_table(rows))[2:] == lines
    large = at | {"preset": "huge", "compile": True, "length": 64, "reason": "out of memory: all"}
    newest = dataclasses.replace(RUN, date="2028-01-01T00:00:00+00:00")
    rows.append(newest.row("failed", 1, "", **large))  # a run of which nothing was measured
    lines = [
        ["2 × 64, huge, compiled", "out of memory"],
        ["2 × 64, tiny, compiled, recomputed", "22"],
        ["2 × 64, tiny", "11"],
        ["2 × 128, tiny", "12"],
    ]
    assert cells(training_table(rows))[2:] == lines


def test_training_steps_of_several_sizes_say_which_size_a_line_is_of():
    """A line without a size would be read as one of the size that the text below names."""
    at = {"dtype": "any", "batch": 2, "length": 64, "candidate": "cosformer", "compile": False}
    later = dataclasses.replace(RUN, date="2027-01-01T00:00:00+00:00")
    rows = [
        RUN.row("train_speed", 9.0, "tokens/s", preset="tiny", parameters=10**6, **at),
        later.row("train_speed", 4.0, "tokens/s", preset="huge", parameters=10**9, **at),
    ]
    table = training_table(rows)
    assert cells(table)[2:] == [["2 × 64, huge", "4"], ["2 × 64, tiny", "9"]]
    assert "decoders huge of 1,000.0 and tiny of 1.0 million parameters" in table
    assert "decoder tiny of 1.0 million parameters" in training_table(rows[:1])
