"""`cosformer study` at toy size: runs end as one row each, whatever stops them."""

import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cosformer import records
from cosformer.commands import crew as crews
from cosformer.commands import crew_run, reproduce, study, study_run
from cosformer.commands.crew_run import UNRECORDED
from cosformer.commands.study_run import row_of, work
from cosformer.recipes import PROBES, PROTOCOLS, Trial
from cosformer.training import losses_by_position, read_json

ONLY = ("softmax", "multiscale")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two rates, and no waiting."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # it imports this package
    monkeypatch.setattr(crews, "POLL", 0.01)
    shorter(monkeypatch, rates=(3e-3, 1e-3))


def shorter(monkeypatch, **changes):
    monkeypatch.setitem(PROTOCOLS, "tiny", replace(PROTOCOLS["tiny"], **changes))


def options(here, task="lm", **changes):
    given = {"only": ONLY, "jobs": 2, "threads": 1, "device": "cpu", "scale": "tiny"}
    given |= {"data": "my.txt", "out": here / "runs", "rows": here / "rows.jsonl"}
    return study.Options(task, **(given | changes))


def book(here):
    return options(here).book


def trial_of(row):
    return book(Path()).trial_of(row)


def results(here):
    return book(here).results()


def kept(here):
    path = here / "rows.jsonl"
    return records.read(path) if path.exists() else []


def dies(todo):
    """As by an illegal access on a GPU."""
    if todo.trial.entry == "softmax":
        os.kill(os.getpid(), signal.SIGKILL)
    work(todo)


def test_runs_end_as_one_row_each_and_a_second_call_runs_nothing(here, capsys):
    assert study.run(options(here)) == 0
    rows = kept(here)
    assert sorted((row.config["entry"], row.config["rate"]) for row in rows) == [
        ("multiscale", 1e-3), ("multiscale", 3e-3), ("softmax", 1e-3), ("softmax", 3e-3),
    ]  # fmt: skip
    for row in rows:
        c = row.config
        run = trial_of(row).name
        judged = read_json(here / "runs" / run / "status.json")["metrics"]
        assert (row.what, row.unit) == ("bits_per_byte", "bits")
        assert row.value == pytest.approx(judged["bits_per_byte"], rel=1e-5)
        assert len(c["by_position"]) == 4
        assert (c["first"], c["steps"], c["seed"]) == (c["by_position"][0], 6, 0)
        assert [point[0] for point in c["curve"]] == [2, 4, 6]
        assert [point[0] for point in c["valid_curve"]] == [3, 6]
        assert c["tokens_per_second"] > 0
        assert set(c["stream_bytes"]["32"]) == {c["mechanism"]}
        assert len(c["far"]) == 8
        assert all(0 < bits < 20 for bits in c["far"])
    assert "4 of 4 runs are done, 0 have failed" in capsys.readouterr().out
    (here / "rows.jsonl").write_bytes((here / "rows.jsonl").read_bytes()[:-9])  # a killed writer
    with pytest.warns(UserWarning, match="unfinished"):
        assert study.run(options(here)) == 0
    assert [trial_of(row) for row in kept(here)] == [trial_of(row) for row in rows]
    assert "4 runs, 4 done" in capsys.readouterr().out


def test_runs_on_a_text_file_lie_apart_from_those_of_the_protocol(here):
    def places(**changes):
        book = options(here, out=None, rows=None, **changes).book
        return str(book.folder), str(book.path)

    usual = ("runs/study-lm", "results/study-lm.jsonl")
    own = ("runs/study-lm-my", "runs/study-lm-my/rows.jsonl")
    assert places(scale="full", data=None) == usual
    assert places(scale="full") == own
    assert places() == ("runs/study-lm-my", "runs/study-lm-my/rows-tiny.jsonl")
    table = reproduce.Options("lm", data="my.txt").book
    assert str(table.path) == "runs/reproduce-lm-my/rows.jsonl"


def test_a_process_that_dies_takes_no_other_with_it_and_its_run_is_tried_again(
    here, monkeypatch, capsys
):
    monkeypatch.setattr(study, "work", dies)
    shorter(monkeypatch, rates=(3e-3,))
    assert study.run(options(here)) == 1
    assert [row.config["entry"] for row in kept(here)] == ["multiscale"]
    assert "softmax-lr0.003-seed0-steps6-tiny failed: exit code -9" in capsys.readouterr().err
    monkeypatch.setattr(study, "work", work)
    assert study.run(options(here)) == 0
    assert sorted(row.config["entry"] for row in kept(here)) == sorted(ONLY)


@pytest.mark.usefixtures("heard")
def test_an_interrupted_run_is_saved_and_goes_on(here, monkeypatch):
    shorter(monkeypatch, rates=(3e-3,), steps=60)
    log = here / "runs" / "softmax-lr0.003-seed0-steps60-tiny" / "log.jsonl"

    def interrupt():
        while not (log.exists() and log.read_bytes()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        study.run(options(here, only=("softmax",)))
    assert kept(here) == []
    step = read_json(log.parent / "status.json")["step"]
    assert 0 < step < 60
    assert study.run(options(here, only=("softmax",))) == 0
    (row,) = kept(here)
    assert [point[0] for point in row.config["curve"]] == list(range(2, 61, 2))
    printed = log.parent.with_name(f"{log.parent.name}.txt").read_text()
    assert f"from step {step} on" in printed


def test_time_that_is_up_is_no_failure(here, capsys):
    assert study.run(options(here, minutes=1e-6)) == 0
    assert kept(here) == []
    assert (
        "0 of 4 runs are done, 0 have failed; the same command goes on" in capsys.readouterr().out
    )


def test_a_model_with_a_limit_is_not_judged_beyond_it(here, monkeypatch):
    shorter(monkeypatch, rates=(3e-3,))
    assert study.run(options(here, only=("cosformer",))) == 0
    (row,) = kept(here)
    assert row.config["far"] is None
    assert "far_failed" not in row.config


@pytest.mark.parametrize("found", [torch.OutOfMemoryError("no room"), float("inf")], ids=repr)
def test_what_fails_beyond_the_training_length_costs_no_finished_run(here, monkeypatch, found):
    def judged(model, task, *given, **options):
        if task.facts.length == 32:
            return losses_by_position(model, task, *given, **options)
        if isinstance(found, Exception):
            raise found
        return torch.full((256,), found), torch.ones(256)

    monkeypatch.setattr(study_run, "losses_by_position", judged)
    (trial, *_) = study.trials("lm", "rates", {}, only=ONLY, scale="tiny")
    row = row_of(study.Crew(options(here), [trial]).waiting[0])
    assert row.config["far"] is None
    assert re.match("256 tokens: (no room|losses must be finite)", row.config["far_failed"])
    assert row.value > 0


def test_probes_are_rows_of_right_answers_by_length_where_there_is_no_limit(here, monkeypatch):
    for name in ("induction", "mqar-64"):
        p = replace(PROBES["tiny"][name], rates=(3e-3,))
        monkeypatch.setitem(PROBES["tiny"], name, p)
    chosen = {"only": ("cosformer", "multiscale"), "probes": ("induction", "mqar-64")}
    assert study.run(options(here, "probes", data=None, **chosen)) == 0
    rows = {(row.config["entry"], row.config["probe"]): row for row in kept(here)}
    assert len(rows) == 4
    for (_, probe), row in rows.items():
        judged = read_json(here / "runs" / trial_of(row).name / "status.json")["metrics"]
        assert (row.what, row.unit, row.config["length"]) == ("accuracy", "accuracy", 8)
        assert 0 <= row.value <= 1
        assert row.config["valid"] == judged["accuracy"]
        assert results(here)[trial_of(row)] == judged["accuracy"]
        assert ("by_length" in row.config) == (probe == "induction")
    endless, limited = (rows[name, "induction"] for name in ("multiscale", "cosformer"))
    assert limited.config["by_length"] == {"8": limited.value, "16": None, "32": None}
    assert list(endless.config["by_length"]) == ["8", "16", "32"]
    assert None not in endless.config["by_length"].values()


def test_rows_from_before_there_were_probes_are_still_known(here):
    trial = Trial("lm", "softmax", 3e-3, 0, 6, "tiny")
    config = {name: value for name, value in vars(trial).items() if name != "probe"}
    records.append(
        here / "rows.jsonl", [records.Run.begin().row("bits_per_byte", 2.0, "bits", **config)]
    )
    assert results(here) == {trial: 2.0}


def test_masked_bytes_and_speed_have_rows_of_their_own(here, monkeypatch):
    shorter(monkeypatch, rates=(3e-3,))
    only = {"only": ("multiscale-conv",)}
    assert study.run(options(here, "mlm", **only)) == 0
    assert study.run(options(here, "mlm", stage="speed", **only)) == 0
    judged, timed = kept(here)
    assert (judged.what, timed.what) == ("bits_per_masked_byte", "train_speed")
    assert "stream_bytes" not in judged.config
    assert timed.value == timed.config["tokens_per_second"]
    assert timed.config["jobs"] == 1


def test_steps_that_cannot_be_recorded_are_taken_one_by_one(here, monkeypatch, capsys):
    monkeypatch.setattr(crews, "resolved", lambda device: "cuda")
    crew = study.Crew(options(here), [])
    (trial, *_) = study.trials("lm", "rates", {}, only=ONLY, finalists=1, scale="tiny")
    first = study.Crew(options(here), [trial]).waiting[0]
    assert first.graph
    ended = SimpleNamespace(join=lambda: None, exitcode=UNRECORDED)
    crew.running = [crews.Running(first, ended)]
    crew._ended(crew.running[0])
    assert not crew.failed
    again = crew.waiting[0]
    assert (again.graph, again.out.name) == (False, f"{trial.name}-one-by-one")
    again.out.mkdir(parents=True)
    assert study.Crew(options(here), [trial]).waiting == [again]  # so does the next call


@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_is_compiled_where_that_pays_unless_it_must_not_be(here, monkeypatch, compiles):
    seen = []
    monkeypatch.setattr(
        crew_run, "Trainer", lambda config, processes: seen.append(config) or stop()
    )

    def stop():
        raise KeyboardInterrupt

    (trial, *_) = study.trials("lm", "rates", {}, only=("softmax",), scale="tiny")
    todo = study.Crew(options(here, compile=compiles), [trial]).waiting[0]
    with pytest.raises(KeyboardInterrupt):
        study_run.row_of(todo)
    assert seen[0].compile is (None if compiles else False)


def test_a_run_that_diverged_is_a_row_and_is_not_run_again(here, monkeypatch):
    shorter(monkeypatch, rates=(1e30,))
    assert study.run(options(here, only=("softmax",))) == 0
    (row,) = kept(here)
    assert (row.what, row.unit) == ("diverged", "steps")
    assert results(here) == {trial_of(row): None}
    assert study.run(options(here, only=("softmax",))) == 0
    assert len(kept(here)) == 1


def test_the_live_table_fits_the_terminal(here, tmp_path):
    (trial, *_) = study.trials("lm", "rates", {}, only=ONLY, finalists=1, scale="tiny")
    crew = study.Crew(options(here), [trial])
    todo = crew.waiting[0]
    crew.running = [crews.Running(todo, SimpleNamespace()) for _ in range(40)]
    todo.out.mkdir(parents=True)
    line = {"step": 2, "steps": 6, "loss": 1.0, "tokens_per_second": 9e9, "seconds_left": 1.0}
    (todo.out / "log.jsonl").write_text(json.dumps(line) + '\n{"metrics": {}}\n{"st')
    shown = crews.table(crew, 40, 24)
    assert len(shown) <= 24
    assert max(map(len, shown)) < 40
    assert "1.443" in shown[1]  # bits


def test_wrong_options_are_errors_that_name_them(here):
    with pytest.raises(ValueError, match=r"only must be one of .*got 'softmx'"):
        options(here, only=("softmx",))
    with pytest.raises(ValueError, match="data must be a folder or a text file, got nowhere"):
        options(here, data="nowhere")
    with pytest.raises(ValueError, match=r"data must not be given for probes, .* got my.txt"):
        options(here, "probes", only=())
    with pytest.raises(ValueError, match="jobs must be"):
        options(here, jobs=0)
    with pytest.raises(ValueError, match="threads must be at most 1,024, got 2000"):
        options(here, threads=2000)


def test_a_text_that_no_run_can_learn_from_is_refused_before_any_begins(here):
    for given, message in [
        (
            {"data": str(here)},
            r"data must hold the file enwik8.xz, got .*; `cosformer data get enw",
        ),
        ({"scale": "full"}, r"held_out must be below the text's \d+ bytes, got 2000000"),
    ]:
        with pytest.raises(ValueError, match=message):
            study.run(options(here, **given))
        assert sorted(path.name for path in here.iterdir()) == ["my.txt"]


@pytest.mark.slow
def test_processes_that_import_everything_themselves_do_the_same(here, monkeypatch):
    monkeypatch.setattr(study.Crew, "processes", lambda self: get_context("spawn"))
    shorter(monkeypatch, rates=(3e-3,))
    assert study.run(options(here, only=("softmax",))) == 0
    assert [row.config["entry"] for row in kept(here)] == ["softmax"]
