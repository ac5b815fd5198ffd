"""`cosformer demo` at toy size: what it prints and leaves, and what stops it."""

import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from unittest.mock import Mock

import pytest

from cosformer import records
from cosformer.bench.candidates import CANDIDATES, Candidate
from cosformer.config import plain
from cosformer.demo import command, learning, op
from cosformer.demo.jobs import JOBS, Job
from cosformer.demo.screen import Screen
from cosformer.training import Budget, Evaluation, RunConfig, TaskConfig
from cosformer.training.folder import locked, state_of, write_json

SMALL = {"layers": 1, "width": 16, "heads": 2}


def language(out, seed):
    (out / "text.txt").write_text("To be, or not to be: that is <the> question.\n" * 20)
    task = TaskConfig("lm", {"text": str(out / "text.txt"), "length": 160})
    short = {"budget": Budget(batch=1), "evaluation": Evaluation(batches=1)}
    return RunConfig(task, out, model=SMALL, device="cpu", seed=seed, **short)


def sentences(out, seed):
    lines = [f"{'good' if n % 2 else 'bad'} {n}\t{n % 2}" for n in range(40)]
    (out / "table.tsv").write_text("\n".join(["text\tlabel", *lines]))
    task = TaskConfig("classify", {"data": str(out / "table.tsv"), "text": ["text"], "length": 16})
    return RunConfig(task, out, model=SMALL, budget=Budget(batch=4), device="cpu", seed=seed)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("cosformer.bench.timing.SHORTEST_SAMPLE", 0.0)
    monkeypatch.setitem(JOBS, "lm", Job(language, 0.5, 2))
    monkeypatch.setitem(JOBS, "listops", Job(sentences, 0.5, 2))
    monkeypatch.setitem(op.LIMITS, "reference", 8)
    monkeypatch.setitem(command.SAMPLING, "max_new_tokens", 8)
    monkeypatch.setattr(learning, "_count", lambda seconds, milliseconds, judged: 4)


@pytest.fixture
def options(tmp_path):
    return command.Options(seconds=60, lengths=(8, 16), out=tmp_path / "out")


class Page(HTMLParser):
    """Counts the elements of a page; every one that needs an end must have it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.count, self.links = [], Counter(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.count[tag] += 1
        self.open += [tag] if tag != "meta" else []
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_demo_checks_trains_writes_and_leaves_a_page(options, capsys):
    assert command.run(options) == 0
    printed = capsys.readouterr().out
    said = ["CPU, 1 thread\n", "Exact: outputs, gradients and a stream", "softmax / ours"]
    said += ["4 steps of 1 × up to 160 tokens each, in turns", "memory of a step", "bits per byte"]
    said += [f"speed in training, {what}/s" for what in ("tokens", "sequences")]
    said += ["2 of 4 steps  validation loss: cosFormer ", "4 of 4 steps  validation accuracy: cosF"]
    said += ["to beat: ", "What the cosFormer model writes:\n  | The following", "demo.html"]
    assert [words for words in said if words not in printed] == []
    page = Page((options.out / "demo.html").read_text())
    assert not page.open
    assert all(link.startswith("#") for link in page.links)  # it opens without a network
    assert (page.count["svg"], page.count["table"], page.count["pre"]) == (3, 2, 3)
    rows = records.read(options.out / "demo.jsonl")
    losses = [row.config for row in rows if row.what == "train_loss"]
    steps = [config["step"] for config in losses if config["candidate"] == "softmax"]
    assert steps == [1, 2, 3, 4, 1, 2, 3, 4]
    assert state_of(options.out / "lm-cosformer")["state"] == "finished"


@pytest.mark.slow
def test_after_an_interrupt_and_after_its_end_a_demo_begins_anew(options, monkeypatch, shell):
    monkeypatch.delitem(JOBS, "listops")
    with monkeypatch.context() as patch:
        patch.setattr(Screen, "show", Mock(side_effect=KeyboardInterrupt))
        code, *_ = shell("demo", "--seconds", 60, "--lengths", 8, "--out", options.out)
    assert code == 130
    assert not (options.out / "demo.html").exists()
    assert command.run(options) == command.run(replace(options, seed=1)) == 0
    assert len({row.date for row in records.read(options.out / "demo.jsonl")}) == 2
    assert state_of(options.out / "lm-softmax")["step"] == 4


def test_only_a_run_of_a_demo_that_nobody_works_in_is_removed(tmp_path):
    ours = language(tmp_path, seed=0)
    write_json(tmp_path / "config.json", plain(ours))
    with locked(tmp_path), pytest.raises(ValueError, match="out must not be in use by another"):
        command.begin_anew(ours)
    write_json(tmp_path / "config.json", plain(replace(ours, preset="small")))
    with pytest.raises(ValueError, match=r"no runs but a demo's, got .* with another preset"):
        command.begin_anew(ours)
    assert (tmp_path / "config.json").exists()
    write_json(tmp_path / "config.json", plain(replace(ours, seed=1, budget=Budget(7, 1))))
    command.begin_anew(ours)
    assert not tmp_path.exists()


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
    pair = learning.plan(this, "lm", language(tmp_path, 0), 60, judged=2)
    rows = list(learning.learn(this, pair, deadline=time.monotonic() + 60))
    losses = [row for row in rows if row.what == "train_loss"]
    assert [row.config["candidate"] for row in losses] == ["cosformer", "softmax"] * 4
    for row in (row for row in rows if row.what == "train_speed"):
        assert row.value == pytest.approx(4 * 160 / row.config["seconds"])
