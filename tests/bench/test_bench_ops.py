"""`cosformer bench ops`: checks before timing, one row per number, clear errors."""

import dataclasses

import pytest
import torch

from cosformer import records
from cosformer.bench import ops, steps
from cosformer.bench.candidates import CANDIDATES, Candidate
from cosformer.bench.cells import Cell

SMALL = {"heads": 1, "width": 4, "repeats": 1, "threads": 1, "positions": (2, 5)}


@pytest.fixture
def options(tmp_path):
    small = {**SMALL, "candidates": ("chunked", "sdpa"), "out": tmp_path / "rows.jsonl"}
    return ops.Options(lengths=(8, 16), quadratic_up_to=8, **small)


def test_every_number_is_a_row(options, monkeypatch):
    before, asked = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    options = dataclasses.replace(options, threads=before + 1)
    assert ops.run(options) == 0
    assert (asked[0], asked[-1]) == (before + 1, before)
    rows = records.read(options.path)
    keys = ("candidate", "pass", "length", "position")
    given = [[row.config[key] for key in keys if key in row.config] for row in rows]
    found = [" ".join(map(str, (row.what, *at))) for row, at in zip(rows, given, strict=True)]
    assert found == [
        *("time chunked forward 8", "time sdpa forward 8", "time_ratio sdpa forward 8"),
        *("time chunked forward_backward 8", "time sdpa forward_backward 8"),
        *("time_ratio sdpa forward_backward 8", "peak_memory chunked forward_backward 8"),
        *("peak_memory sdpa forward_backward 8", "time chunked forward 16"),
        *("time chunked forward_backward 16", "peak_memory chunked forward_backward 16"),
        *("step_time 2", "step_memory 2", "step_time 5", "step_memory 5", "step_memory_growth"),
    ]
    assert len({row.date for row in rows}) == 1
    assert all(row.config["heads"] == 1 and row.config["causal"] for row in rows)
    assert rows[0].hardware["threads"] == before
    ours, theirs, ratio = rows[:3]
    assert ratio.value == theirs.value / ours.value
    assert ratio.config["relative_to"] == "chunked"


def test_growth_is_reported_between_the_long_lengths(options, monkeypatch):
    def length_squared(calls, *, repeats, device):
        outs = {name: call() for name, call in calls.items()}  # or gradients, of q first
        tensors = {name: out[0] if isinstance(out, tuple) else out for name, out in outs.items()}
        return {name: float(tensor.shape[2] ** 2) for name, tensor in tensors.items()}

    monkeypatch.setattr(ops, "GROWTH_FROM", 8)
    monkeypatch.setattr(ops, "median_times", length_squared)
    rows = [row for row in ops.measure(options) if row.what == "growth_exponent"]
    assert [(row.config["from"], row.config["to"]) for row in rows] == [(8, 16), (8, 16)]
    assert [row.value for row in rows] == pytest.approx([2, 2])


def test_a_step_needs_no_more_memory_later_in_the_stream(options):
    options = dataclasses.replace(options, positions=(2, 40_000))
    (row,) = (row for row in ops.measure(options) if row.what == "step_memory_growth")
    assert row.value == 0


def test_states_are_reached_by_reading_every_token(options):
    for position in (0, 5, 2**14, 2**14 + 3):
        state = steps.state_at(position, options.setup, Cell(1, 1, 1, 4))
        assert int(state.position) == position


def test_a_failed_check_stops_before_any_timing(options, monkeypatch, capsys):
    right = CANDIDATES["chunked"]
    broken = Candidate(lambda inputs: 1.01 * right.attend(inputs), right.formula)
    monkeypatch.setitem(CANDIDATES, "chunked", broken)
    monkeypatch.setattr(ops, "measure", lambda options: pytest.fail("timed"))
    assert ops.run(options) == 1
    assert "check failed, nothing is timed: output: error" in capsys.readouterr().err
    assert not options.path.exists()


def test_a_file_of_something_else_is_refused_before_any_timing(options, monkeypatch):
    monkeypatch.setattr(ops, "median_times", lambda *calls, **how: pytest.fail("timed"))
    options.path.write_text("my notes")
    with pytest.raises(ValueError, match="out must be a new file or one of rows"):
        ops.run(options)
    assert options.path.read_text() == "my notes"
