"""`cosformer bench mechanisms`: a row for every outcome, refusals and limits among them."""

import dataclasses
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import fake_gpu
import pytest
import torch

from cosformer import records
from cosformer.bench import mechanisms
from cosformer.bench.candidates import PASSES
from cosformer.bench.cells import Cell, Setup
from cosformer.bench.fla import PEERS
from cosformer.mechanisms import MECHANISMS, create
from cosformer.report.mechanisms import mechanism_figure, mechanism_table

SMALL = {"heads": 2, "width": 4, "repeats": 1, "threads": 1}


def options(tmp_path, **given):
    return mechanisms.Options(**{"out": tmp_path / "rows.jsonl", **SMALL, **given})


@pytest.fixture(autouse=True)
def short_tables(monkeypatch):
    monkeypatch.setattr(mechanisms, "GROWTH_FROM", 16)
    for limits in mechanisms.OPTIONS.values():  # tables for long sequences take long to make
        monkeypatch.setitem(limits, "max_length", 64)


SOME = ("cosformer", "softmax", "rfa-gated", "delta", "longformer", "linformer", "synthesizer")
"""One of each kind: with a cache, with controls, not causal, made for a length."""


def test_a_mechanism_gives_times_and_memory_of_both_passes(tmp_path):
    rows = list(mechanisms.measure(options(tmp_path, names=SOME, lengths=(16, 32))))
    for name in SOME:
        kind, mine = MECHANISMS[name], [r for r in rows if r.config.get("candidate") == name]
        for what in ("time", "peak_memory"):
            places = {(r.config["pass"], r.config["length"]) for r in mine if r.what == what}
            assert places == {(p, n) for p in ("forward", "forward_backward") for n in (16, 32)}
        causal, whats = kind.traits.causal != "no", {r.what for r in mine}
        assert {r.config["causal"] for r in mine if r.what == "time"} == {causal}
        assert ("growth_exponent" in whats, "failed" in whats) == (True, not causal)
    table = mechanism_table(rows)
    assert table.count("\n|") == len(SOME) + 1
    assert "| linformer * |" in table
    few = [row for row in rows if row.config["candidate"] in SOME[:3]]
    assert mechanism_figure(few, "svg").startswith(b"<?xml")


def test_a_gpu_is_also_timed_without_its_host(tmp_path, monkeypatch):
    fake_gpu.install(monkeypatch)
    make = lambda options, name: create(name, options.heads, options.width).bfloat16()  # noqa: E731
    monkeypatch.setattr(mechanisms, "_make", make)
    monkeypatch.setattr(mechanisms, "median_times", lambda calls, **_: dict.fromkeys(calls, 77.0))
    monkeypatch.setattr(mechanisms, "peak_extra_bytes", lambda call, device: 96)
    monkeypatch.setattr(mechanisms, "seconds_of", lambda call, device: 0.0)
    given = options(tmp_path, names=("cosformer", "relu"), lengths=(16,), device="cuda")
    recorded = [row.value for row in mechanisms.measure(given) if row.what == "time_graph"]
    assert recorded == 4 * [fake_gpu.TIME]


def test_rows_are_added_to_the_file(tmp_path):
    no_limit = {"seconds": float("inf"), "gigabytes": float("inf")}
    given = options(tmp_path, names=("relu",), lengths=(16,), **no_limit)
    assert mechanisms.run(given) == mechanisms.run(given) == 0
    rows = records.read(given.path)
    assert [row.what for row in rows] == 2 * ["peak_memory", "time", "peak_memory", "time"]
    assert len({row.date for row in rows}) == 2


LIMITS = [
    ("softmax", (16, 2**20), {"seconds": 1.0}, "skipped: a call would take about "),
    ("linear", (64, 4096), {"gigabytes": 1e-3}, "out of memory: it would need about "),
    ("synthesizer", (16, 128), {"seconds": 1e-9}, "refused: it takes up to 64 tokens"),
]


@pytest.mark.parametrize(("name", "lengths", "limit", "reason"), LIMITS)
def test_a_length_beyond_a_limit_is_a_row_that_says_so(tmp_path, name, lengths, limit, reason):
    rows = list(mechanisms.measure(options(tmp_path, names=(name,), lengths=lengths, **limit)))
    failed = [row.config for row in rows if row.what == "failed"]
    assert [config["length"] for config in failed] == 2 * [max(lengths)]
    assert all(config["reason"].startswith(reason) for config in failed)
    other = next(row for row in rows if row.what == "time")
    config = {**other.config, "candidate": "other", "length": max(lengths)}
    table = mechanism_table([*rows, dataclasses.replace(other, config=config)])
    assert f"| {reason.partition(':')[0]} |" in table


def test_a_mechanism_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    explode = Mock(side_effect=torch.OutOfMemoryError("tried to allocate"))
    monkeypatch.setattr(MECHANISMS["linear"], "attend", explode)
    rows = list(mechanisms.measure(options(tmp_path, names=("linear", "relu"), lengths=(16, 32))))
    failed = [row.config for row in rows if row.what == "failed"]
    expected = [("linear", n, "out of memory: tried to allocate") for n in (16, 32, 16, 32)]
    assert [(c["candidate"], c["length"], c["reason"]) for c in failed] == expected
    assert any(row.what == "time" and row.config["candidate"] == "relu" for row in rows)


def test_no_guess_goes_far(tmp_path, monkeypatch):
    """A call of which most does not grow with the length, guessed from a much shorter one."""
    spent, tried = {16: 1.0, 64: 1.1, 256: 1.4, 1000: 2.6}, []
    monkeypatch.setattr(mechanisms, "_call", lambda *given: tried.append(given[2].length) or Mock())
    monkeypatch.setattr(mechanisms, "seconds_of", lambda *_: spent[tried[-1]])
    monkeypatch.setattr(mechanisms, "peak_extra_bytes", lambda *_: 96)
    monkeypatch.setattr(mechanisms, "median_times", lambda calls, **_: dict.fromkeys(calls, 1.0))
    given = options(tmp_path, names=("linear",), lengths=(16, 1000), seconds=10.0)
    rows = list(mechanisms.measure(given))
    assert tried == 2 * [16, 64, 256, 1000]
    assert {row.config["length"] for row in rows if row.what == "time"} == {16, 1000}
    assert not any(row.what == "failed" for row in rows)
    tried.clear()
    given = options(tmp_path, names=("linear",), lengths=(1000,), seconds=5.0)
    reasons = {row.config["reason"] for row in mechanisms.measure(given)}
    assert tried == 2 * [256]  # before the first length, too
    assert reasons == {"skipped: a call would take about 5 s"}


def test_peers_of_mechanisms_find_tokens_before_heads_in_memory(monkeypatch):
    def attend(q, k, v, *, g):
        assert all(x.is_contiguous() for x in (q, k, v))
        return q + g[..., None], None

    place = SimpleNamespace(chunk_simple_gla=attend)
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", place)
    setup, cell = Setup("cpu", torch.float32, repeats=1, seed=0), Cell(2, 3, 8, 4)
    peer = PEERS["fla-gated-linear"](cell.heads, cell.width)
    for pass_name in PASSES:
        mechanisms._call(setup, peer, cell, pass_name, True)()
