"""`cosformer reproduce --small`: runs end as rows, whatever stops them, and go on anywhere."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_data
import torch

from cosformer import records
from cosformer.commands import crew as crews
from cosformer.commands import crew_run, reproduce, reproduce_probes, reproduce_run
from cosformer.commands.reproduce_run import work
from cosformer.recipes import PROBES, TABLES, TableRun
from cosformer.report.tables import TABLES as SHOWN
from cosformer.training import Trainer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # processes import this
    monkeypatch.setattr(crews, "POLL", 0.01)


def options(here, table="lm", **changes):
    given = {"only": ("softmax",), "columns": ("enwik8",), "jobs": 2, "threads": 1}
    given |= {"device": "cpu", "small": True, "out": here / "runs", "rows": here / "rows.jsonl"}
    return reproduce.Options(table, **(given | changes))


def kept(here):
    path = here / "rows.jsonl"
    return records.read(path) if path.exists() else []


def searched(here):
    return [(row.config["entry"], row.config["rate"], row.config["seed"]) for row in kept(here)]


def refused(todo):
    raise ValueError("data must be there, got none")


def breaks(todo):
    """As a run that cannot be run, and one that is killed."""
    if todo.trial.rate == 3e-3:
        crew_run.work(todo, refused)
    os.kill(os.getpid(), signal.SIGKILL)


def overflows(todo):
    """As a model whose loss on test is no number, while what it is judged by is one."""
    normal = reproduce_run.evaluate
    reproduce_run.evaluate = lambda *a, **k: normal(*a, **k) | {"loss": float("nan")}
    work(todo)


def too_large(todo):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def is_crowded(todo):
    """Out of memory unless it is alone."""
    crew_run.work(todo, too_large) if todo.jobs > 1 else work(todo)


@pytest.mark.slow
def test_rates_are_searched_then_seeds_and_a_second_call_runs_nothing(here, capsys):
    only = ("softmax", "cosformer-gated")
    assert reproduce.run(options(here, only=only)) == 0
    assert "5 of 5 runs have ended, 0 of them diverged, 0 failed" in capsys.readouterr().out
    rows = kept(here)
    best = min(
        (row for row in rows if row.config["entry"] == "softmax" and row.config["seed"] == 0),
        key=lambda row: row.config["valid"],
    )
    wanted = [(entry, rate, 0) for entry in only for rate in (3e-3, 1e-3)]
    assert sorted(searched(here)) == sorted([*wanted, ("softmax", best.config["rate"], 1)])
    for row in rows:
        c = row.config
        assert (row.what, row.unit) == ("bits_per_byte", "bits per byte")
        assert row.value == c["test"]["bits_per_byte"]
        assert (c["steps"], c["batch"], c["length"], c["best_step"]) == (4, 4, 32, 4)
        assert 3 < c["floor"] < 6
        assert c["model"]["conv"] == (4 if c["entry"] == "softmax" else 0)
    assert reproduce.run(options(here, only=only)) == 0
    assert len(kept(here)) == 5
    assert "5 runs, 5 done" in capsys.readouterr().out
    mine = [row for row in rows if row.config["entry"] == "softmax"]
    chosen = [row.value for row in mine if row.config["rate"] == best.config["rate"]]
    assert f"| softmax | – | {np.mean(chosen):.3f} ± " in SHOWN["reproduced"](kept(here))


@pytest.mark.slow
def test_a_table_that_was_cut_goes_on_where_its_folder_and_its_data_lie_elsewhere(
    here, monkeypatch, capsys
):
    column = TABLES["lra"].small["listops"]
    monkeypatch.setitem(TABLES["lra"].small, "listops", replace(column, rates=(1e-3,), seeds=(0,)))
    (here / "data").mkdir()
    first = {"columns": ("listops",), "data": str(here / "data")}
    crew = reproduce.Crew(options(here, "lra", **first))
    reproduce._generate([crew.waiting[0].trial], str(here / "data"))
    todo = crew.waiting[0]
    config = todo.trial.config(todo.out, data=None, device="cpu", graph=False)
    monkeypatch.setenv("COSFORMER_DATA", str(here / "data"))
    events = Trainer(config).events()
    for event in events:
        if getattr(event, "step", 0) == 1:
            break
    events.close()  # saves the step
    monkeypatch.delenv("COSFORMER_DATA")
    assert reproduce.run(options(here, "lra", **first, minutes=1e-6)) == 0
    assert "0 of 1 runs have ended, 0 of them diverged, 0 failed; the same command goes on" in (
        capsys.readouterr().out
    )
    (here / "runs").rename(here / "moved")
    (here / "data").rename(here / "other")
    there = {"columns": ("listops",), "data": str(here / "other"), "out": here / "moved"}
    assert reproduce.run(options(here, "lra", **there)) == 0
    (row,) = kept(here)
    assert row.what == "accuracy"
    assert "from step 1 on" in next((here / "moved").glob("*.txt")).read_text()


def test_what_fails_is_a_row_with_its_reason_and_is_tried_again_if_asked(here, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "work", breaks)
    assert reproduce.run(options(here)) == 1
    reasons = {row.config["rate"]: row.config["reason"] for row in kept(here)}
    assert {row.what for row in kept(here)} == {"failed"}
    assert reasons[3e-3] == "ValueError: data must be there, got none (exit code 1)"
    assert reasons[1e-3] == "exit code -9"
    shown = capsys.readouterr()
    assert "enwik8-softmax-lr0.003-seed0-small failed: ValueError" in shown.err
    assert "failed at rate 0.001: exit code -9" in SHOWN["reproduced"](kept(here))
    monkeypatch.setattr(reproduce, "work", work)
    assert reproduce.run(options(here)) == 1  # without being asked, nothing is run again
    assert len(kept(here)) == 2
    assert reproduce.run(options(here, retry=True)) == 0
    assert [row.what for row in kept(here)[2:]] == ["bits_per_byte"] * 3
    assert "failed" not in SHOWN["reproduced"](kept(here))


def test_a_number_that_is_none_costs_no_row(here, monkeypatch):
    monkeypatch.setattr(reproduce, "work", overflows)
    assert reproduce.run(options(here)) == 0
    assert [row.config["test"]["loss"] for row in kept(here)] == ["nan"] * 3


def test_a_run_that_diverged_is_a_row_and_has_no_seeds(here, monkeypatch):
    column = TABLES["lm"].small["enwik8"]
    monkeypatch.setitem(TABLES["lm"].small, "enwik8", replace(column, rates=(1e30,)))
    assert reproduce.run(options(here)) == 0
    (row,) = kept(here)
    assert (row.what, row.unit) == ("diverged", "steps")
    assert "diverged at rate 1e+30: " in SHOWN["reproduced"](kept(here))


@pytest.mark.slow
def test_runs_that_do_not_fit_beside_others_are_run_alone(here, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "work", is_crowded)
    assert reproduce.run(options(here)) == 0
    assert "out of memory beside others, goes on later; now 1 at a time" in capsys.readouterr().out
    assert [row.config["jobs"] for row in kept(here)] == [1, 1, 1]


def test_columns_without_data_are_left_out_or_refused_if_named(here, capsys):
    (here / "data").mkdir()
    found = reproduce._columns(options(here, "lra", columns=(), data=str(here / "data")))
    assert found == ("listops", "pathfinder")
    assert "text is left out: data must hold the file imdb_train" in capsys.readouterr().out
    named = options(here, "lra", columns=("image",), data=str(here / "data"))
    with pytest.raises(ValueError, match=r"columns must be tasks whose data are there, got image"):
        reproduce._columns(named)


def test_wrong_options_are_errors_that_name_them(here):
    with pytest.raises(ValueError, match=r"only must be one of .*got 'softmx'"):
        options(here, only=("softmx",))
    with pytest.raises(ValueError, match="data must be a folder or a text file for lm, got no"):
        options(here, data="nowhere")
    with pytest.raises(ValueError, match=r"data must be a folder for lra, got my.txt"):
        options(here, "lra", columns=(), data="my.txt")
    with pytest.raises(ValueError, match="jobs must be"):
        options(here, jobs=0)


@pytest.fixture
def data(here):
    """A data folder with small files."""
    (here / "data").mkdir()
    small_data.write(here / "data")
    return str(here / "data")


@pytest.mark.slow
@pytest.mark.parametrize("table", ["lra", "lra-pretrained", "ablation"])
def test_every_column_of_the_arena_ends_as_a_number(here, data, table, monkeypatch):
    for name, column in TABLES[table].small.items():
        monkeypatch.setitem(TABLES[table].small, name, replace(column, rates=column.rates[:1]))
    only = {"lra": ("bigbird", "sinkhorn"), "ablation": ("relu-cosine-decay",)}
    only = only.get(table, ("hybrid",))
    chosen = {"only": only, "columns": tuple(TABLES["lra"].columns), "data": data}
    assert reproduce.run(options(here, table, **chosen)) == 0
    assert {row.what for row in kept(here)} == {"accuracy"}
    shown = SHOWN["reproduced"](kept(here))
    (line,) = (line for line in shown.splitlines() if line.startswith(f"| {only[-1]} |"))
    assert line.count("–") == (2 if table == "ablation" else 0)  # its texts
    assert (table == "lra-pretrained") == ("of masked pre-training" in shown)


@pytest.mark.slow
def test_fine_tuning_begins_with_the_best_run_on_masked_tokens(here, data):
    chosen = {"only": ("longformer",), "columns": ("sst2",), "data": data}
    assert reproduce.run(options(here, "mlm", **chosen)) == 0
    masked, fine = ([r for r in kept(here) if r.config["column"] == c] for c in ("masked", "sst2"))
    assert [(row.what, row.unit) for row in masked] == [("loss", "nats")] * 2
    best = min(masked, key=lambda row: row.config["valid"]).config
    assert {row.config["start"] for row in fine} == {
        f"masked-longformer-lr{best['rate']:g}-seed0-small"
    }
    assert {row.config["length"] for row in fine} == {32}  # as long as the positions are


def test_fine_tuning_is_left_out_where_rows_are_but_not_the_checkpoint(here, data, capsys):
    chosen = {"columns": ("sst2",), "data": data}
    masked = [
        TableRun("mlm", "softmax", "masked", rate, seed, "small")
        for rate, seed in ((1e-3, 0), (3e-3, 0), (1e-3, 1))
    ]
    this = records.Run.begin(device="cpu")
    rows = [
        this.row("loss", each.rate, "nats", valid=each.rate, **each.described()) for each in masked
    ]
    records.append(here / "rows.jsonl", rows)
    assert reproduce.run(options(here, "mlm", **chosen)) == 1
    told = capsys.readouterr()
    assert "6 runs, 3 done" in told.out
    assert "runs that begin with masked-softmax-lr0.001-seed0-small are left out" in told.err
    assert len(kept(here)) == 3  # no row says that they failed


def test_minutes_count_what_is_generated_before_the_runs(here, monkeypatch):
    monkeypatch.setattr(reproduce, "_generate", lambda *_: time.sleep(0.2))
    monkeypatch.setattr(reproduce.Crew, "_start", lambda *_: pytest.fail("time is up"))
    assert reproduce.run(options(here, minutes=0.1 / 60)) == 0


@pytest.mark.slow
def test_every_entry_of_the_ablation_ends_as_a_row_of_texts(here, monkeypatch):
    for name, column in TABLES["ablation"].small.items():
        one = replace(column, rates=column.rates[:1], seeds=(0,))
        monkeypatch.setitem(TABLES["ablation"].small, name, one)
    only = ("identity", "relu-decay", "relu-cosine-decay")
    assert reproduce.run(options(here, "ablation", only=only, columns=(), data="my.txt")) == 0
    assert {row.config["text"] for row in kept(here)} == {"another"}
    assert len(kept(here)) == 6
    assert "none with a convolution" in SHOWN["reproduced"](kept(here))


def test_rows_of_a_run_name_it(here):
    run = TableRun("lm", "softmax", "enwik8", 3e-3, 1, "small")
    row = records.Run.begin().row("bits_per_byte", 2.0, "bits per byte", **run.described())
    assert options(here).book.trial_of(row) == run


def test_probes_are_those_of_the_study_at_all_rates_and_then_with_seeds(here, monkeypatch, capsys):
    probe = replace(PROBES["tiny"]["mqar-64"], rates=(3e-3,))
    monkeypatch.setitem(PROBES["tiny"], "mqar-64", probe)
    given = {"only": ("delta-conv",), "columns": ("mqar-64",), "small": True}
    given |= {"jobs": 2, "threads": 1, "device": "cpu", "out": here / "runs"}
    given |= {"rows": here / "rows.jsonl"}
    assert reproduce_probes.run(reproduce_probes.Options(**given, minutes=1e-6)) == 0
    assert (
        "0 of 1 runs are done, 0 have failed; the same command goes on" in capsys.readouterr().out
    )
    assert reproduce_probes.run(reproduce_probes.Options(**given)) == 0
    assert sorted(searched(here)) == [("delta-conv", 3e-3, seed) for seed in probe.seeds]
    assert "| delta-conv |" in SHOWN["probes"](kept(here))
    with pytest.raises(ValueError, match=r"^columns must be one of mqar-64, .*got 'mqar'"):
        reproduce_probes.Options(**given | {"columns": ("mqar",)})


def test_a_text_file_serves_the_columns_of_the_ablation_that_learn_text(here):
    given = {"only": (), "data": "my.txt"}
    assert reproduce._columns(options(here, "ablation", columns=(), **given)) == (
        "masked",
        "causal",
    )
    with pytest.raises(ValueError, match=r"columns must be of masked, causal where .*got text"):
        reproduce._columns(options(here, "ablation", columns=("text",), **given))
