"""`cosformer train` and `runs`, as they are typed."""

import contextlib
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cosformer.commands import train
from cosformer.commands.train import Options, resolve
from cosformer.mechanisms import MECHANISMS
from cosformer.models import recommended
from cosformer.recipes import Setting, recipe
from cosformer.training import Pretraining, Progress, Trainer, load

TINY = [
    "--steps", "2", "--batch", "4", "--preset", "tiny", "--set", "log_every=1", "--device", "cpu",
    "--set", "model.layers=1", "--set=model.width=16", "--set=evaluation.batches=1",
]  # fmt: skip
LM = ["train", "lm", "--data", "my.txt", *TINY]


def lm(**given):
    """The run of that command, with other options."""
    tiny = ("log_every=1", "model.layers=1", "model.width=16", "evaluation.batches=1")
    settings = (*tiny, *given.pop("set", ()))
    small = {"steps": 2, "batch": 4, "preset": "tiny", "device": "cpu", "set": settings}
    return resolve(Options("lm", data="my.txt", **small, **given))


def stop_after_a_step(config):
    with contextlib.closing(Trainer(config).events()) as events:
        next(event for event in events if isinstance(event, Progress))


def test_a_text_is_enough_and_the_same_command_says_that_it_is_finished(here, shell):
    shown = shell.shows(*LM)
    (run,) = (here / "runs").iterdir()
    said = [f"run: runs/{run.name} (the same command continues it)", "on cpu (1 thread)"]
    said += ["model: cosformer-gated, positions none, norm yes, gate sigmoid, conv none, as rec"]
    said += [
        "cosformer-gated decoder, 1 layers of 16",
        "training 2/2  loss",
        "finished: 2 steps",
    ]
    assert [words for words in said if words not in shown] == []
    assert load(run).model.config.mechanism == "cosformer-gated"
    log = (run / "log.jsonl").read_bytes()
    assert f"runs/{run.name} is finished: 2 steps" in shell.shows(*LM)
    assert (run / "log.jsonl").read_bytes() == log


def test_a_run_whose_text_is_gone_says_what_is_missing(here, shell):
    """And nothing of the settings, which are those that the run began with."""
    command = (*LM, "--length", 64, "--out", "r")
    shell.shows(*command)
    (here / "my.txt").unlink()
    assert "r is finished: 2 steps" in shell.shows(*command)
    error = shell.refuses(*command, "--steps", 3)
    assert f"got '{here.resolve() / 'my.txt'}', which does not exist" in error


@pytest.mark.parametrize("by", ["--out", "--config"])
def test_more_steps_extend_a_finished_run(here, by, shell):
    command = (*LM, "--pretrain", "masked", "--out", "r")
    shell.shows(*command)
    assert "`--out r --steps` with more steps extends it" in shell.shows(*command)
    more = command if by == "--out" else ("train", "lm", "--config=r/config.json")
    shown = shell.shows(*more, "--steps", 20)
    said = "extended: 2 steps to 20; after step 2 the learning rate is that of a run of 20 steps\n"
    assert said in shown
    assert "pretraining" not in shown
    config = load("r").config
    assert (config.ends, config.pretraining.budget.steps) == ((2, 20), 2)
    assert config.evaluation.every == 1
    assert "r is finished: 20 steps" in shell.shows(*more, "--steps", 20)
    as_it_is = ("train", "lm", "--data", "my.txt", *TINY[2:], "--pretrain", "masked", "--out", "r")
    assert "r is finished: 20 steps" in shell.shows(*as_it_is)  # not the steps of the recipe
    assert "must be at least the 20 of the run in r, got 2: it can be" in shell.refuses(*command)


def test_a_run_without_its_last_checkpoint_says_that_it_begins_anew(here, shell):
    shell.shows(*LM, "--out", "r")
    _, _, err = shell(*LM, "--out", "r", "--steps", 4)
    assert "no last checkpoint" not in err
    (here / "r" / "last.safetensors").unlink()
    code, out, err = shell(*LM, "--out", "r", "--steps", 6)
    assert (code, "finished: 6 steps" in out) == (0, True)
    assert "r has no last checkpoint: training begins at step 0" in err


def test_the_recommended_model_writes_beyond_its_length_and_remembers_no_more(here, shell):
    shell.shows(*LM, "--length", "16", "--out", "r")
    assert len(shell.shows("generate", "r", "--tokens", "300", "--prompt", "green")) > 200
    assert "), and as many after any number of them\n" in shell.shows("evaluate", "r")


def test_what_becomes_of_odd_texts_is_said(here, shell):
    rows = ["label,text", "0,", *(f"{n % 2},{'ab'[n % 2] * (n % 7 + 1)}" for n in range(39))]
    (here / "own.csv").write_text("\n".join(rows))
    given = ("--length", 5, "--set", "task.options.tokens=bytes", "--out", "r")
    _, _, err = shell("train", "classify", "--data", "own.csv", *given, *TINY)
    assert "1 of 40 texts are empty and are read as one start token" in err
    assert "10 of 40 sequences are longer than length=5 and are cut" in err


def test_threads_are_taken_and_a_busy_machine_is_warned_of(here, monkeypatch, shell):
    taken = []
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 3.0, 3.0))
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    code, out, err = shell(*LM, "--threads", 2)
    assert (code, taken, "on cpu (2 threads)" in out) == (0, [2], True)
    assert "train: the machine is busy (load 3.0 before the start)" in err
    assert err.endswith(" (--threads 1 is faster on a busy machine)\n")


def test_a_hybrid_goes_on_after_a_stop_and_writes_beyond_its_length(here, shell):
    pattern = "cosformer-multiscale*2 softmax"
    command = [*LM, "--mechanism", pattern, "--set=model.layers=3", "--length", "16", "--out", "r"]
    stop_after_a_step(lm(mechanism=pattern, set=("model.layers=3",), length=16, out=Path("r")))
    shown = shell.shows(*command)
    assert "from step 1 on" in shown
    assert "model: cosformer-multiscale*2 softmax, positions none rotary, norm yes, " in shown
    shell.shows(*command[:-1], "whole")
    one, other = (load(folder).model.state_dict() for folder in ("r", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(shell.shows("generate", "r", "--tokens", "60", "--prompt", "green")) > 40
    remembered = shell.shows("evaluate", "r").partition("a stream remembers ")[2]
    each = 2 * 16 * 4  # keys and values of 16 columns in float32
    assert f", softmax {16 * each:,})" in remembered
    assert f"and {each} more with every later one\n" in remembered


CLOTHES = {
    "flag": {"mechanism": "softmax"},
    "set": {"set": ("model.mechanism=softmax",)},
    "file": {"config": Path("a.toml")},
}


def test_a_mechanism_comes_with_what_is_recommended_for_it_however_it_is_named(here):
    (here / "a.toml").write_text("[model]\nmechanism = 'softmax'\n")
    found = [resolve(Options("lm", device="cpu", **given)) for given in CLOTHES.values()]
    assert found[0] == found[1] == found[2]
    assert found[0].model == recommended("lm", "softmax")
    bare = ("model.conv=0", "model.positions=learned")
    bare = resolve(Options("lm", device="cpu", mechanism="softmax", set=bare))
    assert bare.model == recommended("lm", "softmax") | {"conv": 0, "positions": "learned"}
    assert len({bare.out.name, found[0].out.name, resolve(Options("lm")).out.name}) == 3


OLD_MODEL = "model: cosformer, positions learned, norm auto, gate none, conv none\n"


@pytest.fixture
def older(here):
    """A run from before a model was recommended, stopped after its first step."""
    config = lm(out=Path("r"))
    model = {name: config.model[name] for name in config.model.keys() - recommended("lm").keys()}
    stop_after_a_step(replace(config, model=model))
    return config.out


@pytest.mark.parametrize("given", [[*LM, "--out", "r"], ["train", "lm", "--config=r/config.json"]])
def test_an_older_run_goes_on_as_it_was(older, given, shell):
    shown = shell.shows(*given)
    assert OLD_MODEL in shown
    assert "from step 1 on" in shown
    assert load(older).model.config.positions == "learned"
    shell.shows("evaluate", older)
    shell.shows("generate", older, "--prompt", "green", "--tokens", "5")
    assert "is finished" in shell.shows(*given)


def test_an_older_run_is_not_mixed_with_what_is_recommended(older, shell):
    settings = ["--config", "r/config.json", "--out", "s", "--seed", "7"]
    assert OLD_MODEL in shell.shows(*LM[:2], *settings)
    mixed = shell.refuses(*LM, "--out", "r", "--set", "model.conv=4")
    assert "with model.conv = None, here it is 4" in mixed
    assert lm(start=older).model.keys().isdisjoint(recommended("lm"))


def test_flat_options_of_a_pattern_are_answered_with_the_right_form(here, shell):
    given = ("--mechanism", "local cosformer", "--set", "model.options.window=8")
    code, _, err = shell(*LM, *given, "--set", "model.layers=2")
    assert code != 0
    assert 'as {"local": {…}, "cosformer": {…}}, got window=8' in err
    assert not (here / "runs").exists()


MINE = """from cosformer.mechanisms import MECHANISMS, register
register("mine", type("Mine", (MECHANISMS["softmax"],), {"__doc__": "Softmax by another name."}))
"""


def test_a_mechanism_of_the_users_own_file_is_trained_judged_and_used(here, monkeypatch, shell):
    (here / "mine.py").write_text(MINE)
    command = (*LM, "--mechanism", "mine", "--out", "r")
    assert "mechanism must be one of cosformer, " in shell.refuses(*command)
    using = (["evaluate", "r"], ["generate", "r", "--prompt", "a", "--tokens", "2"])
    assert "mine decoder" in shell.shows(*command, "--plugin", "mine.py")
    for verb in using:
        forget()
        code, _, err = shell(*verb)
        ran = f"cosformer: running the plugin {here / 'mine.py'}, as r/config.json says\n"
        assert (code, err) == (0, ran)
    (here / "mine.py").rename(here / "moved.py")
    for verb in using:
        forget()
        assert "mine.py: --plugin says where it is" in shell.refuses(*verb)
        shell.shows(*verb, "--plugin", "moved.py")
    forget()


def forget():
    """As in a new process."""
    MECHANISMS.pop("mine", None)
    for name in ("mine", "moved"):
        sys.modules.pop(f"cosformer_plugin_{name}", None)


PLUGINS = {
    "1/0": "got bad.py, line 1: ZeroDivisionError: division by zero",
    "\nx = (": "got bad.py, line 2: SyntaxError",
    "import nowhere": "got bad.py, line 1: ModuleNotFoundError",
    None: "plugin must be a Python file, got bad.py, which does not exist",
}


@pytest.mark.parametrize("content", PLUGINS)
def test_a_missing_or_broken_plugin_is_named(here, content, shell):
    if content is not None:
        (here / "bad.py").write_text(content)
    assert PLUGINS[content] in shell.refuses(*LM, "--plugin", "bad.py")
    assert not (here / "runs").exists()


def test_all_that_a_task_is_made_of_is_generated_by_all_cores(here, capsys, monkeypatch):
    made = []
    note = lambda options: made.append((*options.names, options.count))  # noqa: E731
    monkeypatch.setattr(train.make, "run", note)
    options = ("task.options.sizes=[60,10,10]", "task.options.rising=5")
    train.generate_sets(resolve(Options("pathfinder", data=str(here), set=options)))
    assert made == [("pathfinder", 80), ("snakes", 60)]
    assert "snakes: 60 samples are generated first" in capsys.readouterr().out


STATES = [{"state": "running", "step": "far"}, {"state": "finished", "steps": 3}]
STATES += [{}, {"state": ["finished"], "step": 3}]
ODD = [("config.json", {}), ("config.json", {"architectures": ["BertForMaskedLM"]})]
ODD += [("status.json", state) for state in STATES]


def test_runs_are_listed_with_their_state_and_an_odd_folder_hides_none(here, run, shell):
    for number, (name, content) in enumerate(ODD):
        folder = shutil.copytree(run, here / "runs" / str(number))
        (folder / name).write_text(json.dumps(content))
    status = json.loads((run / "status.json").read_text())
    for name, state in (("s", "running"), ("t", "failed")):
        folder = shutil.copytree(run, here / "runs" / name)
        (folder / "status.json").write_text(json.dumps({**status, "state": state, "step": 2}))
    *odd, r, s, t = shell.shows("runs").splitlines()
    assert all(f"runs/{n}  unreadable: " in line for n, line in enumerate(odd))
    assert len(odd) == len(ODD)
    assert r.split()[:5] == ["runs/r", "finished", "3", "of", "3"]
    assert "best loss" in r
    assert s.split()[:3] == ["runs/s", "interrupted", "2"]
    assert t.split()[:2] == ["runs/t", "failed"]
    assert shell("runs", "nowhere")[0] == 2


def test_models_of_transformers_are_no_runs(tmp_path, shell):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    assert shell.shows("runs", tmp_path) == f"no runs in {tmp_path}\n"


def test_losses_of_runs_are_a_picture_with_a_colour_for_each(here, run, shell):
    pytest.importorskip("matplotlib")
    other = shutil.copytree(run, here / "runs" / "folder" / "s")
    with (other / "log.jsonl").open("a") as log:
        log.write('{"phase": "training", "st')  # a process was killed
    (shutil.copytree(run, here / "runs" / "t") / "log.jsonl").unlink()
    picture = here / "losses.svg"
    assert "written: losses.svg (2 of 3 runs)\n" in shell.shows("runs", "--plot", "losses.svg")
    drawn = picture.read_bytes()
    for name in ("r, training", "folder/s, training", "folder/s, validation"):
        assert f"<!-- {name} -->".encode() in drawn
    shell.shows("runs", "--plot", "losses.svg")
    assert picture.read_bytes() == drawn
    assert "plot must end in .svg, .png, .pdf, got a.gif" in shell.refuses(
        "runs", "--plot", "a.gif"
    )
    code, _, err = shell("runs", "runs/t", "--plot", "t.svg")
    assert (code, "a run with losses in its log, got runs/t" in err) == (2, True)
    assert not (here / "t.svg").exists()


def test_a_run_that_diverges_ends_with_one_line_and_a_1(here, shell):
    command = [*LM, "--set", "optimiser.clip=none"]
    code, _, err = shell(*command, "--out", "r", "--lr", "1e30")
    assert code == 1
    assert re.search(r"cosformer: train: step .*not finite.*no checkpoint yet in r.*\n$", err)
    assert "failed" in shell.shows("runs", ".")
    settings = ("save_seconds=0", "schedule.warmup=0", "optimiser.lr=1e15", "budget.steps=6")
    settings += ("evaluation.every=6",)  # a loss on validation would end it before a checkpoint
    words = [word for each in settings for word in ("--set", each)]
    code, _, err = shell(*command, *words, "--out", "s")
    kept = load(here / "s", "last").place.step
    assert (code, kept > 0) == (1, True)
    assert f"the checkpoint of step {kept:,} is in s" in err


WRONG = [
    ("chess", "task must be one of lm, mlm, classify"),
    ("", "TASK must come first"),
    ("lm --data nowhere.txt", "text (--data) must be a file or folder, or one of python, manual"),
    ("lm --data nowhere.txt", "got 'nowhere.txt', which does not exist"),
    ("classify --data nowhere.csv", "nowhere.csv, which does not exist"),
    ("classify --data .", "which is a folder"),
    ("classify", "a table of texts and labels (a .tsv, .csv or .jsonl file), got none"),
    ("classify --data own.tsv", "--set task.options.text=COLUMN names it"),
    ("classify --data own.tsv --set task.options.text=review", "--set task.options.label=COLUMN n"),
    ("copying --mechanism sofmax", "got 'sofmax'; did you mean 'softmax'?"),
    ("lm --data=", "--data must be a path, got ''"),
    ("lm --out=", "--out must be a path, got ''"),
    ("lm --set out=", "out must be a path, got ''"),
    ("lm --set task.options.text=", "task.options.text (--data) must be a path or a name, got ''"),
    ("lm --data my.txt --out my.txt", "out must be a folder, got my.txt, which is a file"),
    ("lm --data my.txt --out my.txt/r", "out must lie in a folder, got my.txt/r, but my.txt is a "),
    ("lm --preset giant", "preset must be one of tiny, mini"),
    ("lm --steps 0", "steps must be a whole number from 1 on, got 0"),
    ("lm --steps five", "--steps must be a whole number, got 'five'; see --help"),
    ("lm --step 5", "did you mean --steps?"),
    ("lm --threads 0", "threads must be a whole number from 1 on, got 0"),
    ("lm --threads 2000 --steps 0", "threads must be at most 1,024, got 2000"),
    ("lm --data blank.txt", "long enough for three parts, to train, validate and test, got 3 by"),
    ("lm --device cuda:99", "device must be one that torch finds, got 'cuda:99' where it finds "),
    ("lm --set optimizer.lr=1", "got 'optimizer'; did you mean 'optimiser'?"),
    ("lm --set optimizer.lr", "set must be a.b=value, as optimiser.lr=1e-3, got 'optimizer.lr'"),
    ("lm --set model.vocabulary=3", "model.vocabulary must be left to the task"),
    ("lm --set", "--set must have a value, got none"),
    ("image --length 3", "option of image must be one of data, got 'length'"),
    ("sst2 --set task.options.name=cola", "option of sst2 must be one of data, text"),
    ("lm --set task.options.text=2024", "text must be text, got 2024"),
    ("listops --set task.options.sizes=5", "sizes must be a list, got 5"),
    ('listops --set task.options.sizes=["a",5,5]', "sizes must be a whole number, got 'a'"),
    ("mqar --data x", "data must not be given for mqar"),
    ("lm --device gpu", "device must be auto, cpu"),
    ("lm --config no.toml", "config must be a file, got no.toml"),
    ("lm --config task.toml", "task must have settings of its own, got 'lm'"),
    ("text --data .", "`cosformer data get imdb` fetches it"),
    ("lm --data my.txt --mechanism linformer", "linformer cannot attend causally"),
    ("copying --pretrain masked --mechanism linformer", "linformer cannot attend causally"),
    ("lm --data my.txt --set model.options.foo=3", "got foo"),
    (
        "lm --data my.txt --mechanism cosformer --set model.options.horizon=3",
        "must allow the 128 tokens of training",
    ),
    ("lm --data my.txt --set tensorboard=true", "pip install 'cosformer[tensorboard]'"),
    ("lm --data my.txt --wandb", "pip install 'cosformer[wandb]'"),
    ("lm --set evaluation.every=0", "evaluation.every must be a whole number from 1 on, got 0"),
    (
        f"copying --mechanism reformer --set model.options.seed={2**70}",
        f"seed must be below {2**63}",
    ),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(words, message, here, monkeypatch, shell):
    (here / "task.toml").write_text("task = 'lm'\n")
    (here / "own.tsv").write_text("stars\treview\n1\tgood\n0\tbad\n")
    (here / "blank.txt").write_text("\n\n\n")
    before = sorted(here.iterdir())
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert message in shell.refuses("train", *words.split())
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("text", ["body", '["body"]'])
def test_a_column_is_named_with_or_without_a_list(here, text, shell):
    rows = [f"{n % 2}\t{'ab'[n % 2] * 5}" for n in range(40)]
    (here / "own.tsv").write_text("\n".join(["label\tbody", *rows]) + "\n")
    command = ["train", "classify", "--data", "own.tsv", "--length", "8", *TINY]
    shell.shows(*command, "--set", f"task.options.text={text}")


def test_a_missing_package_is_named_before_the_work(here, monkeypatch, shell):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'cosformer[train]'" in shell.refuses(*LM)
    assert not (here / "runs").exists()


def test_recipe_then_file_then_flags_then_set(here):
    content = "seed = 1\n[optimiser]\nlr = 1.0\n[budget]\nsteps = 1\nbatch = 1\n"
    (here / "a.toml").write_text(content)
    given = {"task": "lm", "device": "cpu", "config": Path("a.toml")}
    assert resolve(Options(**given)).optimiser.lr == 1.0
    config = resolve(Options(**given, steps=2, batch=2, set=("budget.batch=3",)))
    assert (config.seed, config.budget.steps, config.budget.batch) == (1, 2, 3)
    assert config.preset == recipe("lm", Setting()).preset
    (here / "c.json").write_text(json.dumps({"device": "cpu"}))
    assert resolve(Options("lm", config=Path("c.json"))).device == "cpu"
    (here / "b.toml").write_text("task.name = 'mlm'\n")
    with pytest.raises(ValueError, match="task must be that of the config, mlm, got lm"):
        resolve(Options("lm", config=Path("b.toml")))


def test_settings_name_the_folder(here):
    seeds = (None, None, 5)
    one, same, other = (resolve(Options("lm", device="cpu", seed=seed)).out for seed in seeds)
    assert one == same != other
    assert (one.parent, one.name[:-8]) == (Path("runs"), "lm-cosformer-gated-")
    assert resolve(Options("lm", device="cpu", set=("out=here",))).out == Path("here")
    pattern = resolve(Options("lm", device="cpu", mechanism="local cosformer*2")).out.name
    assert pattern.startswith("lm-local-cosformerx2-")


def test_set_reaches_what_flags_reach(here, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    settings = ("budget.steps=7", "optimiser.lr=0.5", "device=cpu")
    by_set = resolve(Options("lm", pretrain="masked", set=settings))
    assert by_set == resolve(Options("lm", pretrain="masked", steps=7, lr=0.5, device="cpu"))
    assert by_set.preset == recipe("lm", Setting("cpu")).preset


@pytest.mark.parametrize(("task", "option"), [("lm", "text"), ("sst2", "data")])
def test_data_as_a_flag_wins_over_the_file(task, option, here):
    (here / "a.toml").write_text(f"[task.options]\n{option} = 'other'\nlength = 8\n")
    config = resolve(Options(task, data="my.txt", config=Path("a.toml")))
    assert config.task.options[option] == str(here / "my.txt")
    assert config.task.options["length"] == 8
    last = resolve(Options(task, data="my.txt", set=(f"task.options.{option}=a.toml",)))
    assert last.task.options[option] == str(here / "a.toml")


def test_pretraining_is_a_flag_and_a_part_of_the_file(here):
    config = resolve(Options("image", steps=7, pretrain="masked", set=("pretraining.lr=1",)))
    assert config.pretraining == Pretraining("masked", 0.5, config.budget, 1.0)
    assert config.budget.steps == 7
    (here / "a.toml").write_text("[pretraining]\nrate = 0.4\nobjective = 'masked'\n")
    config = resolve(Options("image", pretrain="causal", config=Path("a.toml"), lr=0.5))
    assert config.pretraining == Pretraining("causal", 0.4, config.budget, 0.5)
    (here / "b.toml").write_text("[pretraining]\nlr = 0.1\n")
    for given in ({"pretrain": "masked"}, {"config": Path("b.toml")}):
        assert resolve(Options("mqar", **given)).model["conv"] == 5  # both phases can use it
    (here / "a.json").write_text(json.dumps({"pretraining": None}))
    config = resolve(Options("image", pretrain="masked", config=Path("a.json")))
    assert config.pretraining == Pretraining("masked", 0.5, config.budget, config.optimiser.lr)


def test_a_file_is_named_in_full(here):
    config = resolve(Options("lm", data="my.txt"))
    assert config.task.options["text"] == str(here / "my.txt")
    (here / "wikitext2").mkdir()  # a known name is that text, ./wikitext2 is the folder
    assert resolve(Options("lm", data="wikitext2")).task.options["text"] == "wikitext2"
    (here / "a.toml").write_text("[task.options]\ntext = './wikitext2'\ndata = 'not/yet'\n")
    options = resolve(Options("lm", config=Path("a.toml"))).task.options
    assert (options["text"], options["data"]) == (str(here / "wikitext2"), str(here / "not/yet"))


@pytest.mark.parametrize(("size", "length"), [(100, 16), (2000, 32), (10**6, 256)])
def test_the_length_fits_the_text(here, size, length):
    (here / "my.txt").write_bytes(b"x" * size)
    assert resolve(Options("lm", data="my.txt", device="cpu")).task.options["length"] == length


@pytest.mark.parametrize(("steps", "given", "every"), [(50, (), 5), (3, (), 1), (50, (7,), 7)])
def test_a_run_of_other_steps_is_judged_as_often(steps, given, every):
    settings = tuple(f"evaluation.every={each}" for each in given)
    assert resolve(Options("mqar", steps=steps, set=settings)).evaluation.every == every
