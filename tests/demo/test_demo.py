"""`cosformer demo` at toy size: what it prints and leaves, and what stops it."""

import functools
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from html_page import Page

from cosformer import records
from cosformer.bench.candidates import CANDIDATES, Candidate
from cosformer.config import plain
from cosformer.demo import command, learning, looking, op
from cosformer.demo.jobs import JOBS, Job
from cosformer.demo.screen import Screen
from cosformer.models import recommended
from cosformer.report import NAMES, floor_sentence, verdict
from cosformer.training import Budget, Evaluation, RunConfig, TaskConfig
from cosformer.training.folder import locked, state_of, write_json

REAL = dict(JOBS)
SMALL = {"layers": 1, "width": 16, "heads": 2, "max_length": 160}


def language(out, seed, mechanism="softmax", length=80):
    text = out.parent / "text.txt"
    text.write_text("To be, or not to be: that is <the> question.\n" * 20)
    task = TaskConfig("lm", {"text": str(text), "length": length})
    short = {"budget": Budget(batch=1), "evaluation": Evaluation(batches=1)}
    model = {**SMALL, **recommended("lm", mechanism)}
    return RunConfig(task, out, model=model, device="cpu", seed=seed, **short)


def planned(folder, name="short", length=80, before=None):
    """Both runs of a job, in the folder of a demo."""
    configs = {each: language(folder / f"{name}-{each}", 0, each, length) for each in NAMES}
    return learning.plan(records.Run.begin(seed=0), name, configs, 60, judged=2, before=before)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("cosformer.bench.timing.SHORTEST_SAMPLE", 0.0)
    monkeypatch.setitem(JOBS, "short", Job(language, 0.5, 2))
    monkeypatch.setitem(JOBS, "long", Job(functools.partial(language, length=160), 0.5, 2))
    monkeypatch.setitem(op.LIMITS, "reference", 8)
    monkeypatch.setitem(looking.SAMPLING, "max_new_tokens", 8)
    monkeypatch.setattr(learning, "_count", lambda seconds, milliseconds, judged: 4)


@pytest.fixture
def options(tmp_path):
    return command.Options(seconds=60, lengths=(8, 16), out=tmp_path / "out")


def test_the_demo_checks_trains_writes_and_leaves_a_page(options, capsys):
    assert command.run(options) == 0
    printed = capsys.readouterr().out
    said = ["CPU, 1 thread\n", "Exact: outputs, gradients and a stream", "softmax / ours"]
    said += [f"4 steps of 1 × {length} tokens each, in turns" for length in (80, 160)]
    said += ["2 of 4 steps  validation loss: cosFormer ", "memory of a step", "bits per byte"]
    said += ["speed in training, tokens/s", "To beat: ", "demo.html"]
    said += [f"What the {name} model writes:\n  | The following" for name in NAMES.values()]
    said += [
        "layer 1, head 1   layer 1, head 2",
        "Π_{j<t≤i} γ_t",
        "looks back in the mean",
        " softmax (too few steps to tell which one learns better)",
    ]
    assert [words for words in said if words not in printed] == []
    page = Page((options.out / "demo.html").read_text())
    assert not page.open
    assert all(link.startswith(("#", "data:")) for link in page.links)  # it needs no network
    assert (page.count["svg"], page.count["table"], page.count["pre"]) == (3, 2, 9)
    assert [len(model["layers"]) for model in page.data["maps"]] == [1, 1]
    rows = records.read(options.out / "demo.jsonl")
    losses = [row.config for row in rows if row.what == "train_loss"]
    steps = [config["step"] for config in losses if config["candidate"] == "softmax"]
    assert steps == [1, 2, 3, 4, 1, 2, 3, 4]
    assert state_of(options.out / "long-softmax")["state"] == "finished"


def test_long_windows_go_on_with_the_models_of_short_ones(tmp_path):
    short = planned(tmp_path)
    untrained = planned(tmp_path, "long", 160, before=short)
    assert untrained.configs["softmax"].start is None
    list(learning.learn(records.Run.begin(seed=0), short, deadline=time.monotonic() + 60))
    trained = planned(tmp_path, "long", 160, before=short)
    assert trained.configs["softmax"].start == tmp_path / "short-softmax"


@pytest.mark.parametrize("name", JOBS)
def test_both_have_what_is_recommended_and_differ_by_no_more(tmp_path, name):
    facts = planned(tmp_path).task.facts
    ours, theirs = (REAL[name].make(tmp_path, 0, each) for each in NAMES)
    rate = ours.optimiser.lr
    assert replace(theirs, model=ours.model, optimiser=replace(theirs.optimiser, lr=rate)) == ours
    ours, theirs = ours.model_config(facts), theirs.model_config(facts)
    worn = {"norm": True, "gate": "sigmoid", "conv": 0}
    assert ours == replace(theirs, mechanism="cosformer-gated", **worn)
    assert (theirs.norm, theirs.gate, theirs.conv) == (None, False, 4)  # which is best for softmax
    assert ours.position_schemes(causal=True) == {"cosformer-gated": "none"}
    assert theirs.position_schemes(causal=True) == {"softmax": "rotary"}


def test_maps_are_shaded_for_a_terminal():
    lines = looking.shaded([torch.eye(16)[None]], height=4, width=8).splitlines()
    assert lines == ["layer 1, head 1", "██      ", "  ██    ", "    ██  ", "      ██"]


VERDICTS = {
    "learns better than softmax and trains faster: ": (3.0, 4.0, 200.0, 100.0, 1000),
    "learns as well as softmax and trains faster: ": (4.02, 4.0, 200.0, 100.0, 1000),
    "learns worse than softmax but trains faster: ": (4.1, 4.0, 200.0, 100.0, 1000),
    "learns better than softmax but trains slower: ": (3.0, 4.0, 90.0, 100.0, 1000),
    "learns worse than softmax and trains slower: ": (4.1, 4.0, 90.0, 100.0, 1000),
    "is ahead of softmax (too few steps": (3.0, 4.0, 200.0, 100.0, 999),
    "is behind softmax (too few steps": (4.1, 4.0, 200.0, 100.0, 84),
    "is ahead of softmax (too few": (4.1, 6.0, 75.0, 100.0, 1000),
    "0.75 times the speed; softmax did not beat the fr": (4.1, 6.0, 75.0, 100.0, 1000),
}
"""Words -> losses, speeds and steps of which they are said; the floor is 5."""


@pytest.mark.parametrize("words", VERDICTS)
def test_the_verdict_says_who_lost(words):
    this, values = records.Run.begin(seed=0), VERDICTS[words]
    rows = [this.row("floor", 5.0, "nats", task="short", floor_is="a guess")]
    assert verdict(rows) == "The time was too short for a verdict."
    for name, loss, speed in zip(NAMES, values[:2], values[2:4], strict=True):
        at = {"candidate": name, "step": values[4]}
        rows.append(this.row("valid_loss", loss, "", task="short", length=8, **at))
        rows.append(this.row("train_speed", speed, "tokens/s", task="long", length=64, **at))
    assert words in verdict(rows)
    failed = [NAMES[name] for name, loss in zip(NAMES, values[:2], strict=True) if loss >= 5]
    assert floor_sentence(rows, "short").endswith(
        f"{failed[0]} did not beat it." if failed else "To beat: 5.000 (a guess)."
    )


@pytest.mark.slow
def test_after_an_interrupt_and_after_its_end_a_demo_begins_anew(options, monkeypatch, shell):
    monkeypatch.delitem(JOBS, "long")
    with monkeypatch.context() as patch:
        patch.setattr(Screen, "show", Mock(side_effect=KeyboardInterrupt))
        code, *_ = shell("demo", "--seconds", 60, "--lengths", 8, "--out", options.out)
    assert code == 130
    assert not (options.out / "demo.html").exists()
    assert command.run(options) == command.run(replace(options, seed=1)) == 0
    assert len({row.date for row in records.read(options.out / "demo.jsonl")}) == 2
    assert state_of(options.out / "short-softmax")["step"] == 4


def test_only_a_run_of_a_demo_that_nobody_works_in_is_removed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    ours = language(folder, seed=0)
    write_json(folder / "config.json", plain(ours))
    with locked(folder), pytest.raises(ValueError, match="out must not be in use by another"):
        command.begin_anew(ours)
    write_json(folder / "config.json", plain(replace(ours, preset="small")))
    with pytest.raises(ValueError, match=r"those of this demo, got .* with another preset"):
        command.begin_anew(ours)
    assert (folder / "config.json").exists()
    write_json(folder / "config.json", plain(replace(ours, seed=1, budget=Budget(7, 1))))
    command.begin_anew(ours)
    assert not folder.exists()


def test_without_time_nothing_is_learnt_and_nothing_written(options, capsys, monkeypatch):
    monkeypatch.setattr(command, "GRACE", 0.0)
    assert command.run(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("The time is up after 0 steps.") == 2
    assert "too short for a checkpoint" in printed
    assert (options.out / "demo.html").read_text().count("<svg") == 1


def test_the_demo_fails_when_the_op_is_wrong(options, capsys, monkeypatch):
    right = CANDIDATES["chunked"]
    broken = Candidate(lambda inputs: 1.01 * right.attend(inputs), right.formula)
    monkeypatch.setitem(CANDIDATES, "chunked", broken)
    monkeypatch.setattr(op, "race", lambda *given: pytest.fail("timed"))
    assert command.run(options) == 1
    assert "check failed: output" in capsys.readouterr().err
    assert not options.out.exists()


def test_a_file_of_something_else_is_refused_before_the_work(options, monkeypatch):
    monkeypatch.setattr(command, "show_checks", lambda this: pytest.fail("checked"))
    options.out.mkdir(parents=True)
    (options.out / "demo.jsonl").write_text("my notes")
    with pytest.raises(ValueError, match="out must be a new file or one of rows"):
        command.run(options)


def test_runs_take_turns_and_only_their_own_time_counts(tmp_path):
    this = records.Run.begin(seed=0)
    rows = list(learning.learn(this, planned(tmp_path), deadline=time.monotonic() + 60))
    losses = [row for row in rows if row.what == "train_loss"]
    assert [row.config["candidate"] for row in losses] == [*NAMES] * 4
    for row in (row for row in rows if row.what == "train_speed"):
        assert row.value == pytest.approx(4 * 80 / row.config["seconds"])
