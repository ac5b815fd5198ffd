"""What `cosformer bench ops --device cuda` writes, without a GPU: rows, failures, arithmetic."""

import dataclasses
from collections import Counter
from unittest.mock import Mock

import fake_gpu
import pytest
import torch

from cosformer import State, records
from cosformer.bench import floor, gpu, ops
from cosformer.bench.candidates import CANDIDATES, Candidate
from cosformer.bench.cells import Case, Cell, Setup

SETUP = Setup("cpu", torch.float32, repeats=1, seed=0)
CELL = Cell(2, 4, 8, 4)
SHAPES = ((2, 2, 8, 4), (1, 2, 16, 4))
RUN = records.Run({"device": "cuda"}, {}, None, 0, "2026-01-02T03:04:05+00:00")


def _options(folder, monkeypatch):
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(gpu, "STEPS", (Cell(2, 2, 1, 4),))
    small = {"candidates": ("chunked", "sdpa"), "shapes": SHAPES, "quadratic_up_to": 8}
    small |= {"dtype": "float32", "positions": (), "threads": 1, "out": folder / "rows.jsonl"}
    return ops.Options(device="cuda", **small)


@pytest.fixture
def options(tmp_path, monkeypatch):
    return _options(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of one run that no test changes."""
    with pytest.MonkeyPatch.context() as patch:
        options = _options(tmp_path_factory.mktemp("bench"), patch)
        assert ops.run(options) == 0
    return records.read(options.path)


def test_every_cell_is_measured_both_ways_in_both_passes(rows):
    found = Counter((row.what, row.config["candidate"]) for row in rows)
    cases = 2 * 2 * 2  # cells, passes, causal and full
    for what in ("time", "time_graph", "floor_ratio", "bandwidth", "peak_memory"):
        assert found[what, "chunked"] == cases
        assert found[what, "sdpa"] == cases / 2  # the longer cell is too long for it
    assert found["floor", "copy"] == cases
    assert found["time_ratio", "sdpa"] == cases / 2
    # on the smaller cell alone: forward, both, and both in the caller's thread; causal and full
    assert found["host_time", "chunked"] == found["host_time", "additions"] == 3 * 2
    assert found["error", "chunked"] == 2 * 4  # causal and full; output and gradients
    assert found["copy_bandwidth", "copy"] == 1
    assert found["step_time_graph", "step"] == found["step_time_graph", "step_decay"] == 1
    assert not any(row.what == "failed" for row in rows)
    sizes = ("batch", "heads", "length", "width")
    for row in rows:
        if row.what in ("time", "time_graph", "floor", "floor_ratio", "host_time", "peak_memory"):
            assert {"causal", "dtype", "pass", "candidate"} <= row.config.keys()
            assert tuple(row.config[size] for size in sizes) in SHAPES


def test_ratios_to_the_floor_are_those_of_the_rows(rows):
    found = {
        (row.what, row.config["candidate"], row.config["pass"]): row.value
        for row in rows
        if row.config.get("length") == 16 and row.config["causal"] and "pass" in row.config
    }
    bytes_ = 4 * (2 * 16 * 4) * 4  # q, k, v and out of 128 numbers, in float32
    for pass_name, times in (("forward", 1), ("forward_backward", 3)):
        least = 1e3 * times * bytes_ / 1e9
        assert found["floor", "copy", pass_name] == pytest.approx(least)
        assert found["floor_ratio", "chunked", pass_name] == pytest.approx(fake_gpu.TIME / least)
        rate = times * bytes_ / (fake_gpu.TIME / 1e3)
        assert found["bandwidth", "chunked", pass_name] == pytest.approx(rate)
        assert found["peak_memory", "chunked", pass_name] == 96 / (3 * 128 * 4)


def test_who_runs_out_of_memory_is_a_row_and_the_others_are_measured(options, monkeypatch):
    refuse = Mock(side_effect=torch.cuda.OutOfMemoryError("no room\nsecond line"))
    monkeypatch.setitem(CANDIDATES, "sdpa", dataclasses.replace(CANDIDATES["sdpa"], attend=refuse))
    rows = list(ops.measure(options))
    failed = [row.config for row in rows if row.what == "failed"]
    found = [(config["candidate"], config["length"], config["reason"]) for config in failed]
    # one cell is short enough: two passes, causal and full
    assert found == 4 * [("sdpa", 8, "out of memory: no room")]
    timed = {row.config["candidate"] for row in rows if row.what == "time"}
    assert timed == {"chunked"}


def test_a_missing_peer_is_one_row_and_the_error_of_a_wrong_one_is_in_rows(options, monkeypatch):
    ours = CANDIDATES["chunked"]
    twice = lambda inputs: 2 * ours.attend(inputs)  # noqa: E731
    double = Candidate(twice, ours.formula, package="torch", causal_only=True)
    missing = dataclasses.replace(CANDIDATES["fla_linear"], package="no_such_package")
    monkeypatch.setitem(CANDIDATES, "fla_cos", double)
    monkeypatch.setitem(CANDIDATES, "fla_linear", missing)
    options = dataclasses.replace(options, candidates=("chunked", "fla_cos", "fla_linear"))
    assert ops.run(options) == 0
    found = records.read(options.path)
    (row,) = (row for row in found if row.config.get("candidate") == "fla_linear")
    assert row.what == "failed"
    assert row.config["reason"] == "package no_such_package is not installed"
    wrong = [row for row in found if row.config.get("candidate") == "fla_cos"]
    errors = [row for row in wrong if row.what == "error"]
    assert [row.config["quantity"] for row in errors] == ["output", "dq", "dk", "dv"]
    assert all(row.value > row.config["allowed"] for row in errors)
    assert {row.config["causal"] for row in wrong} == {True}
    assert any(row.what == "time" for row in wrong)


def test_a_call_that_cannot_be_recorded_gives_no_row(options, monkeypatch, capsys):
    capturing = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(gpu, "recorded", Mock(side_effect=capturing))
    whats = {row.what for row in ops.measure(options)}
    assert {"time", "floor"} <= whats
    assert not {"time_graph", "floor_ratio", "step_time_graph", "failed"} & whats
    said = "chunked cannot be recorded as a CUDA graph: RuntimeError: oper"
    assert said in capsys.readouterr().err


def test_cells_and_directions_are_those_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ops.Options(device="cuda", causal=False).causalities == (False,)
    two = [Cell(2, 8, 8, 64), Cell(2, 8, 9, 64)]
    assert ops.Options(device="cuda", lengths=(9, 8), batch=2).measured == two
    named = ops.Options(device="cuda", cells=("8x16x4096x64-grouped",))
    assert named.measured == [Cell(8, 16, 4096, 64, key_heads=4)]


def test_who_takes_part_depends_on_length_and_causality(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Candidate, "is_present", True)
    there = ops.Options(device="cuda")
    ours = ["auto", "decay", "gates", "chunked"]
    of_fla = ["fla_linear", "fla_fused", "fla_retention", "fla_simple_gla", "fla_gla"]
    linear = [*ours, "fla_cos", *of_fla]
    assert there.taking_part(Cell(1, 16, 65536, 64), causal=True) == list(there.names)
    assert there.taking_part(Cell(1, 16, 65537, 64), causal=True) == linear
    assert there.taking_part(Cell(1, 16, 65537, 64), causal=False) == ours
    packed = Cell(64, 16, 1024, 64, packing="packed")
    assert there.taking_part(packed, causal=True) == [*ours, *of_fla]


def test_candidates_at_home_in_another_layout_get_it(monkeypatch):
    look = Mock()
    for name in ("fla_linear", "fla_gla"):
        candidate = dataclasses.replace(CANDIDATES[name], attend=look)
        monkeypatch.setitem(CANDIDATES, name, candidate)
        inputs = SETUP.inputs(CELL)
        Case(SETUP, CELL, inputs, [name]).calls("forward")[name]()
        (given,) = look.call_args.args
        for found, drawn in ((given.q, inputs.q), (given.v, inputs.v)):
            assert found.transpose(1, 2).is_contiguous()
            assert torch.equal(found, drawn)
    assert torch.equal(given.gates[..., 3], inputs.gates)
    assert given.gates.transpose(1, 2).is_contiguous()


def test_floors_and_bandwidth_count_bytes_read_and_written(monkeypatch):
    state = State.empty(64, 16, 64, 64, horizon=100)
    sums = 64 * 16 * 2 * 64 * (64 + 1) * 4
    assert floor.state_traffic(state, 1e9) == pytest.approx(1e3 * 2 * (sums + 8) / 1e9)
    monkeypatch.setattr(floor, "COPIED", 1000)
    monkeypatch.setattr(floor, "median_times", fake_gpu.times)
    assert floor.copy_bandwidth(repeats=1, device="cpu") == 2 * 1000 / (fake_gpu.TIME / 1e3)


def test_the_floor_of_gates_counts_four_bytes_for_a_token_and_head():
    inputs = SETUP.inputs(CELL)
    plain, gates = CANDIDATES["decay"], CANDIDATES["gates"]
    for pass_name, times in (("forward", 1), ("forward_backward", 3)):
        more = floor.moved_bytes(inputs, pass_name, gates)
        more -= floor.moved_bytes(inputs, pass_name, plain)
        assert more == times * 2 * 4 * 8 * 4  # batch, heads, tokens, bytes


def test_grouped_and_packed_cells_have_inputs_and_rows_of_their_own():
    grouped = CELL._replace(key_heads=2)
    inputs = SETUP.inputs(grouped)
    assert inputs.q.shape == (2, 4, 8, 4)
    assert inputs.k.shape == inputs.v.shape == (2, 2, 8, 4)
    assert inputs.gates.shape == (2, 2, 8)
    assert SETUP.config(grouped, causal=True)["key_heads"] == 2
    packed = CELL._replace(packing="packed")
    assert SETUP.inputs(packed).q.shape == (1, 4, 16, 4)
    assert SETUP.inputs(packed).cu_seqlens.tolist() == [0, 8, 16]
    drawn = Cell(64, 1, 4096, 4, packing="drawn")
    lengths = drawn.lengths(0)
    assert lengths == drawn.lengths(0) != drawn.lengths(1)
    assert len(lengths) == 64
    assert 16 <= min(lengths) < max(lengths) <= 4096
    assert SETUP.inputs(drawn).q.shape[2] == sum(lengths)
    config = SETUP.config(drawn, causal=True)
    assert (config["packing"], config["tokens"]) == ("drawn", sum(lengths))
    assert SETUP.config(CELL, causal=True).keys().isdisjoint({"packing", "tokens", "key_heads"})


@pytest.mark.parametrize("cell", [CELL._replace(key_heads=2), CELL._replace(packing="packed")])
@pytest.mark.parametrize("causal", [True, False])
def test_every_candidate_of_ours_takes_grouped_and_packed_cells(cell, causal):
    inputs = SETUP.inputs(cell)._replace(causal=causal)
    ours = ["auto", "decay", "gates", "chunked"]
    for call in Case(SETUP, cell, inputs, ours).calls("forward_backward").values():
        out, *gradients = call()
        assert out.shape == inputs.q.shape
        assert [x.shape for x in gradients[:3]] == [inputs.q.shape, *2 * [inputs.k.shape]]


@pytest.mark.parametrize("part", ["errors", "steps", "first_calls", "cells", "positions"])
def test_one_part_can_be_measured_alone(options, part):
    whats = {
        "errors": {"error"},
        "steps": {"step_time_graph", "step_traffic_ratio"},
        "first_calls": {"first_call"},
        "cells": {"time", "time_ratio", "time_graph", "floor", "floor_ratio", "bandwidth"},
        "positions": {"step_time", "step_memory"},
    }
    whats["cells"] |= {"host_time", "peak_memory"}
    options = dataclasses.replace(options, parts=(part,), positions=(2,))
    found = {row.what for row in ops.measure(options)}
    assert found == whats[part] | {"copy_bandwidth"}


def test_an_error_that_is_not_a_number_is_a_failure(monkeypatch):
    ours = CANDIDATES["chunked"]
    broken = lambda inputs: torch.nan * ours.attend(inputs)  # noqa: E731
    monkeypatch.setitem(CANDIDATES, "chunked", Candidate(broken, ours.formula))
    rows = list(gpu.measure_errors(RUN, SETUP, ["chunked", "sdpa"], causal=True))
    assert {row.what for row in rows} == {"failed"}
    assert {row.config["reason"] for row in rows} == {"error is nan"}
