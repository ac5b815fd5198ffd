"""First calls: one process with an empty cache, one with what that left; a failure is a row."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cosformer import records
from cosformer.bench import first_call
from cosformer.bench.cells import CELLS, Cell, Setup

SETUP = Setup("cpu", torch.float32, repeats=1, seed=0)
RUN = records.Run({"device": "cpu"}, {}, None, 0, "2026-01-02T03:04:05+00:00")
CALLS = (("decay", "8x16x1024x64-grouped"),)


def test_the_second_process_finds_the_cache_that_the_first_has_filled(monkeypatch):
    seen = []

    def run(command, *, env, **options):
        folders = [Path(env[name]) for name in first_call.CACHES]
        seen.append([folder.exists() for folder in folders])
        for folder in folders:
            folder.mkdir(exist_ok=True)
        assert command[1:] == ["-m", "cosformer.bench.first_call", *CALLS[0], "float32", "cpu"]
        return SimpleNamespace(returncode=0, stdout=f"a greeting\n{5 / len(seen)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    empty, full = first_call.measure_first_calls(RUN, SETUP, CALLS)
    assert seen == [[False] * 3, [True] * 3]
    assert (empty.config["cache"], empty.value) == ("empty", 5)
    assert (full.config["cache"], full.value) == ("full", 2.5)
    assert (full.config["candidate"], full.config["key_heads"]) == ("decay", 4)


def test_a_process_that_fails_is_one_row(monkeypatch):
    broken = SimpleNamespace(returncode=1, stderr="Traceback\nValueError: no such kernel\n")
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: broken)
    (row,) = first_call.measure_first_calls(RUN, SETUP, CALLS)
    assert (row.what, row.config["cache"]) == ("failed", "empty")
    assert row.config["reason"] == "RuntimeError: ValueError: no such kernel"


@pytest.mark.parametrize("candidate", ["decay", "gates"])
def test_the_process_prints_seconds(candidate, monkeypatch, capsys):
    monkeypatch.setitem(CELLS, "small", Cell(1, 2, 8, 4))
    assert first_call.main([candidate, "small", "float32", "cpu"]) == 0
    assert float(capsys.readouterr().out) > 0
