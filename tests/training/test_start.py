"""Runs that begin with the weights of another: what is taken over, what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training_cases as cases
from test_killed import killed

from cosformer.commands.train import Options, resolve
from cosformer.training import Started, TaskConfig, Trainer, load, train
from cosformer.training.checkpoints import Checkpoint, read, write
from cosformer.training.learner import Learner

SHORT = ("budget.steps=4", "budget.batch=4", "log_every=1", "device=cpu")
SMALL = (*SHORT, "model.layers=1", "model.width=16", "model.mechanism=softmax")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text, and tables of two and of three classes."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "my.txt").write_text("".join(f"{n} green bottles on the wall\n" for n in range(99)))
    for classes in (2, 3):
        rows = [f"{n % classes}\t{'xyz'[n % classes] * (n % 9)} bottles" for n in range(60)]
        (folder / f"{classes}.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(data):
    """Masked models of bytes and of merged bytes, and a classifier."""
    for kind in ("bytes", "bpe"):
        tokens = (f"task.options.tokens={kind}", "task.options.length=32")
        begin(data, "mlm", "my.txt", out=data / kind, set=(*SMALL, *tokens))
    begin(data, "lm", "my.txt", out=data / "even", set=(*SMALL, "task.options.length=32"))
    pooling = ("model.pooling=cls", "task.options.tokens=bytes", "task.options.length=32")
    begin(data, out=data / "two", set=(*SMALL, *pooling))
    return data


def resolved(folder, task="classify", name="2.tsv", **given):
    return resolve(Options(task, data=str(folder / name), **({"set": SHORT} | given)))


def begin(folder, task="classify", name="2.tsv", **given):
    """Train as the command would."""
    train(config := resolved(folder, task, name, **given))
    return config


@pytest.fixture
def begun(monkeypatch):
    """The weights of every phase from now on, before its first step."""
    found, learn = [], Learner.learn

    def recorded(self, fed):
        if self.step == 0:
            found.append({name: t.clone() for name, t in self.model.state_dict().items()})
        learn(self, fed)

    monkeypatch.setattr(Learner, "learn", recorded)
    return found


def taken(state, run):
    """Names of the weights that are those of the run's best checkpoint."""
    learnt = load(run).model.state_dict()
    return {name for name in state if name in learnt and torch.equal(state[name], learnt[name])}


def backbone(state):
    return {name for name in state if name.startswith("backbone.")}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_after_pretraining_on_text_a_table_is_learnt(runs, tmp_path, begun, kind):
    start = shutil.copytree(runs / kind, tmp_path / "mlm")
    config = begin(runs, start=start, out=tmp_path / "run")
    (state,) = begun
    assert taken(state, start) >= backbone(state)
    # the run stands alone: its model, its vocabulary, its data
    vocabulary, model = load(start).vocabulary.plain(), load(start).model.config
    shutil.rmtree(start)
    loaded = load(config.out)
    assert loaded.vocabulary.plain() == vocabulary
    assert loaded.task.facts.vocabulary == model.vocabulary
    assert replace(loaded.model.config, kind="masked-lm", classes=None, dropout=0.0) == model


def test_the_whole_model_is_taken_over_where_it_fits(runs, begun):
    begin(runs, start=runs / "two", seed=1, out=runs / "again")
    begin(runs, name="3.tsv", start=runs / "two", seed=1, out=runs / "three")
    fits, differs = begun
    assert taken(fits, runs / "two") == set(fits)
    assert backbone(differs) <= taken(differs, runs / "two") < set(differs)


def test_a_cls_token_is_left_to_those_who_have_it(runs, tmp_path, begun):
    begin(runs, "mlm", "my.txt", start=runs / "two", out=tmp_path / "without")
    pooling = ("model.pooling=cls", *SHORT)
    begin(runs, start=runs / "bytes", set=pooling, out=tmp_path / "with")
    without, with_it = begun
    assert taken(without, runs / "two") == backbone(without)
    assert taken(with_it, runs / "bytes") == backbone(with_it) - {"backbone.cls"}


def test_pretraining_begins_with_it(runs, tmp_path, begun):
    begin(runs, start=runs / "bytes", pretrain="masked", out=tmp_path / "run")
    first, second = begun
    assert (taken(first, runs / "bytes"), taken(second, runs / "bytes")) == (set(first), set())


def test_what_is_not_said_is_as_in_the_other_run(runs):
    config, before = resolved(runs, start=runs / "bpe"), load(runs / "bpe")
    assert (config.start, config.preset) == (runs / "bpe", before.config.preset)
    assert config.model == {**before.config.model, "max_length": 32, "dropout": 0.1}
    assert config.task.options["length"] == 32
    assert config.task.options["vocabulary"] == before.vocabulary.size
    assert resolved(runs, set=(*SHORT, f"start={runs / 'bpe'}")) == config
    assert config.out.name.startswith("classify-from-bpe-")


WRONG = {
    "no run": ({"start": "data"}, "start must be a run with a checkpoint: run must be a folder"),
    "no checkpoint": ({"start": "early"}, "must have the checkpoint last, got"),
    "mechanism": ({"mechanism": "performer"}, "model.mechanism must be .* 'softmax' in .*bytes, g"),
    "preset": ({"preset": "medium"}, "model.heads must be .* 4 in .*bytes, got 8"),
    "width": ({"set": ("model.width=32",)}, "model.width must be that of .*, 16 in .*, got 32"),
    "option": ({"set": ("model.options.a=1",)}, r"model.options must be .*, \{\} .* got \{'a': 1"),
    "length": ({"length": 33}, "at least the task's length 33, got 32 for a start from"),
    "tokens": ({"set": ("task.options.tokens=bpe",)}, "before, bytes of 256, got bpe"),
    "conv": ({"start": "even"}, "can look at both sides, for a classifier, got conv=4 in .*even: "),
    "size": ({"start": "bpe", "set": ("task.options.vocabulary=300",)}, r"bpe of \d+, got .* 300"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(runs, tmp_path, case):
    (runs / "data").mkdir(exist_ok=True)
    (runs / "early").mkdir(exist_ok=True)
    shutil.copy(runs / "bytes" / "config.json", runs / "early")
    given, message = WRONG[case]
    given = {**given, "start": runs / given.get("start", "bytes"), "out": tmp_path / "run"}
    given["set"] = (*SHORT, *given.get("set", ()))
    with pytest.raises(ValueError, match=message):
        begin(runs, **given)
    assert not (tmp_path / "run").exists()


def test_the_folder_of_another_run_is_refused_and_stays(runs, tmp_path):
    there = shutil.copytree(runs / "bytes", tmp_path / "mlm")
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    for start in (there, runs / "bytes"):
        with pytest.raises(ValueError, match="out must be a new folder or that of the same run"):
            begin(runs, start=start, out=there)
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before


def test_a_mechanism_made_for_one_length_has_no_room_for_a_cls(runs, tmp_path):
    made = (*SMALL, "model.mechanism=linformer", "task.options.length=32")
    begin(runs, "mlm", "my.txt", out=tmp_path / "mlm", set=made)
    given = {"start": tmp_path / "mlm", "set": (*SHORT, "model.pooling=cls")}
    with pytest.raises(ValueError, match=r"model must have a blocks\.0\..* of .*32\], as .*33\]"):
        begin(runs, **given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tokens_that_mean_something_else_are_refused(config, runs, tmp_path):
    train(config)
    task = TaskConfig("copying", {**config.task.options, "vocabulary": 5})
    out = tmp_path / "other"
    with pytest.raises(ValueError, match=r"have the 10 tokens of the run .*, got 11"):
        train(replace(config, task=task, start=config.out, out=out))
    before = load(runs / "bytes")
    text = replace(before.config, model={**before.config.model, "max_length": 32})
    with pytest.raises(ValueError, match=r"tokens must be .*, 256 bytes in .*, got not a text"):
        train(replace(text, task=config.task, start=before.folder, out=out))
    assert not out.exists()
    with pytest.raises(TypeError, match="start must be a Path or None, got str"):
        replace(config, start="runs/mlm")


@pytest.mark.slow
def test_killed_it_goes_on_without_the_other_run(runs, tmp_path):
    start = shutil.copytree(runs / "bpe", tmp_path / "mlm")
    given = {"start": start, "set": (*SHORT, "budget.steps=20")}
    whole = begin(runs, **given, out=tmp_path / "whole")
    config = resolved(runs, **given, out=tmp_path / "run")
    assert killed(config, steps=1, after=0.0)
    assert 0 < load(config.out, "last").place.step < 20
    shutil.rmtree(start)
    assert begin(runs, **given, out=tmp_path / "run") == config
    cases.assert_same_outcome(config.out, whole.out)


def test_without_a_checkpoint_it_begins_from_what_is_there(runs, tmp_path, begun):
    start = shutil.copytree(runs / "bytes", tmp_path / "mlm")
    config = resolved(runs, start=start, out=tmp_path / "run")
    assert isinstance(next(Trainer(config).events()), Started)
    assert (config.out / "config.json").exists()
    found = read(start / "best.safetensors")
    moved = {name: tensor + 1 for name, tensor in found.tensors.items()}
    write(start / "best.safetensors", Checkpoint(moved, found.facts))
    train(config)
    assert taken(begun[-1], start) >= backbone(begun[-1])


def test_runs_say_where_they_started_from(runs, tmp_path, shell):
    flags = [word for each in SHORT for word in ("--set", each)]
    out, start = tmp_path / "run", runs / "bytes"
    given = ("--data", runs / "2.tsv", "--start", start, "--out", out, *flags)
    assert f"run: {out}, from {start} (" in shell.shows("train", "classify", *given)
    assert json.loads((out / "config.json").read_text())["start"] == str(start)
    assert shell.shows("runs", tmp_path).endswith(f"from {start}\n")


@pytest.mark.parametrize("name", ["none", "12"])
def test_a_folder_may_have_any_name(runs, tmp_path, name):
    start = shutil.copytree(runs / "bytes", tmp_path / name)
    found = resolved(runs, start=start, out=Path(name))
    assert (found.start, found.out) == (start, Path(name))
