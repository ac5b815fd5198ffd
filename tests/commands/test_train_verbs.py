"""`cosformer train`, `evaluate` and `runs`, as they are typed."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosformer import cli, records
from cosformer.cli import gathered
from cosformer.commands import train
from cosformer.commands.train import Options, resolve
from cosformer.recipes import RECIPES, Setting, recipe
from cosformer.tasks import TASKS
from cosformer.tasks.tables import KNOWN
from cosformer.training import Pretraining, RunConfig, load

TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))
TINY = [
    "--steps", "6", "--batch", "4", "--preset", "tiny", "--set", "log_every=3",
    "--set", "model.layers=1", "--set=model.width=16", "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a text."""
    (tmp_path / "my.txt").write_text(TEXT)
    (tmp_path / "task.toml").write_text("task = 'lm'\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_text_is_enough(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "lm", "--data", "my.txt", *TINY]) == 0
    shown = capsys.readouterr().out
    (run,) = (here / "runs").iterdir()
    assert f"run: runs/{run.name}" in shown
    assert "cosformer decoder, 1 layers of 16" in shown
    assert "training 6/6  loss" in shown
    assert "finished: 6 steps" in shown
    assert load(run).model.config.mechanism == "cosformer"


def test_the_same_command_says_that_it_is_finished(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "lm", "--data", "my.txt", *TINY]
    assert cli.main(command) == 0
    (run,) = (here / "runs").iterdir()
    log = (run / "log.jsonl").read_bytes()
    capsys.readouterr()
    assert cli.main(command) == 0
    assert f"runs/{run.name} is finished: 6 steps" in capsys.readouterr().out
    assert (run / "log.jsonl").read_bytes() == log


def test_an_evaluation_is_shown_and_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "lm", "--data", "my.txt", "--out", "r", *TINY]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", "r", "--split", "valid", "--checkpoint", "last"]) == 0
    shown = capsys.readouterr().out
    kept = json.loads((here / "r" / "metrics-valid-last.json").read_text())
    assert kept["metrics"].keys() == {"loss", "accuracy", "perplexity", "bits_per_byte"}
    for name, value in kept["metrics"].items():
        assert f"{name:<14} {value:.4f}" in shown
    assert "to beat: loss" in shown
    status = json.loads((here / "r" / "status.json").read_text())
    assert kept["metrics"]["loss"] == pytest.approx(status["metrics"]["loss"], rel=1e-6)

    assert cli.main(["evaluate", "r", "--rows", "rows.jsonl"]) == 0
    rows = {row.what: row for row in records.read(Path("rows.jsonl"))}
    assert rows.keys() == {"loss", "accuracy", "perplexity", "bits_per_byte", "floor"}
    assert rows["floor"].config["task"] == "lm"
    assert rows["floor"].config["options"]["text"] == "my.txt"
    assert rows["floor"].config["optimiser"]["lr"] > 0
    assert rows["floor"].config["pretraining"] is None
    assert rows["floor"].config["budget"]["steps"] >= rows["floor"].config["steps"]
    assert rows["floor"].value == kept["floor"]


def test_all_that_a_task_is_made_of_is_generated_by_all_cores(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[str, int]]()

    def note(options: Any) -> None:
        made.append((*options.names, options.count))

    monkeypatch.setattr(train.make, "run", note)
    options = ("task.options.sizes=[60,10,10]", "task.options.rising=5")
    train._generate(resolve(Options("pathfinder", data=str(here), set=options)))
    assert made == [("pathfinder", 80), ("snakes", 60)]
    assert "snakes: 60 samples are generated first" in capsys.readouterr().out


def test_a_run_that_cannot_be_written_to_is_judged(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "lm", "--data", "my.txt", "--out", "r", *TINY]) == 0
    (here / "r" / "metrics-test-best.json").mkdir()  # in the way, whoever runs this test
    capsys.readouterr()
    assert cli.main(["evaluate", "r", "--rows", "rows.jsonl"]) == 0
    shown = capsys.readouterr()
    assert "test loss" in shown.out
    assert "rows added" in shown.out
    assert "written:" not in shown.out
    assert shown.err.startswith("cosformer: evaluate: not written: ")


def test_runs_are_listed_with_their_state(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c", "d"):
        assert cli.main(["train", "lm", "--data", "my.txt", "--out", f"runs/{name}", *TINY]) == 0
    for name, state in (("b", "running"), ("c", "failed")):
        path = here / "runs" / name / "status.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": state, "step": 4}))
    (here / "runs" / "d" / "status.json").write_text("{")
    capsys.readouterr()
    assert cli.main(["runs"]) == 0
    a, b, c, d = capsys.readouterr().out.splitlines()
    assert a.split()[:5] == ["runs/a", "finished", "6", "of", "6"]
    assert "best loss" in a
    assert b.split()[:3] == ["runs/b", "interrupted", "4"]
    assert c.split()[:2] == ["runs/c", "failed"]
    assert "unreadable" in d
    assert cli.main(["runs", "nowhere"]) == 2


ODD: list[tuple[str, Any]] = [
    ("config.json", {"architectures": ["BertForMaskedLM"]}),
    ("config.json", {}),
    ("status.json", {}),
    ("status.json", {"state": "running", "step": "far"}),
    ("status.json", {"state": "finished", "steps": 3}),
    ("status.json", {"state": ["finished"], "step": 3}),
]


def test_an_odd_folder_hides_no_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "lm", "--data", "my.txt", "--out", "runs/z", *TINY]) == 0
    for number, (name, content) in enumerate(ODD):
        folder = here / "runs" / str(number)
        shutil.copytree(here / "runs" / "z", folder)
        (folder / name).write_text(json.dumps(content))
    capsys.readouterr()
    assert cli.main(["runs"]) == 0
    *odd, z = capsys.readouterr().out.splitlines()
    assert all(f"runs/{n}  unreadable: " in line for n, line in enumerate(odd))
    assert len(odd) == len(ODD)
    assert z.split()[:2] == ["runs/z", "finished"]


def test_a_run_that_diverges_ends_with_one_line_and_a_1(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "lm", "--data", "my.txt", "--out", "r", "--lr", "1e30", *TINY]
    assert cli.main([*command, "--set", "optimiser.clip=none"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cosformer: train: step" in error
    assert "not finite" in error
    assert "no checkpoint yet in r" in error
    assert cli.main(["runs", "."]) == 0
    assert "failed" in capsys.readouterr().out


def test_the_last_line_names_the_checkpoint_that_is_there(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "lm", "--data", "my.txt", "--out", "r", *TINY]
    settings = ("save_seconds=0", "optimiser.clip=none", "schedule.warmup=0", "optimiser.lr=1e15")
    assert cli.main([*command, *(word for each in settings for word in ("--set", each))]) == 1
    kept = load(here / "r", "last").place.step
    assert kept > 0
    assert f"the checkpoint of step {kept:,} is in r" in capsys.readouterr().err


WRONG: list[tuple[list[str], str]] = [
    (["train", "chess"], "task must be one of lm, mlm, classify"),
    (["train"], "task"),
    (["train", "lm", "--data", "nowhere.txt"], "text must be one of python, manual"),
    (["train", "lm", "--mechanism", "sofmax"], "mechanism must be one of cosformer"),
    (["train", "lm", "--preset", "huge"], "preset must be one of tiny, mini"),
    (["train", "lm", "--steps", "0"], "steps must be a whole number from 1 on, got 0"),
    (["train", "lm", "--set", "budget.step=3"], "setting must be one of steps, batch, accumulate"),
    (["train", "lm", "--set", "model.vocabulary=3"], "model.vocabulary must be left to the task"),
    (["train", "lm", "--set", "seed"], "set must be a.b=value, got 'seed'"),
    (["train", "lm", "--set"], "--set must have a value, got none"),
    (["train", "image", "--length", "3"], "option of image must be one of data, got 'length'"),
    (
        ["train", "sst2", "--set", "task.options.name=cola"],
        "option of sst2 must be one of data, text",
    ),
    (["train", "lm", "--set", "task.options.text=2024"], "text must be text, got 2024"),
    (["train", "listops", "--set", "task.options.sizes=5"], "sizes must be a list, got 5"),
    (
        ["train", "listops", "--set", 'task.options.sizes=["a",5,5]'],
        "sizes must be a whole number, got 'a'",
    ),
    (["train", "mqar", "--data", "x"], "data must not be given for mqar"),
    (["train", "lm", "--device", "gpu"], "device must be auto, cpu"),
    (["train", "lm", "--config", "no.toml"], "config must be a file, got no.toml"),
    (["train", "lm", "--config", "task.toml"], "task must have settings of its own, got 'lm'"),
    (["train", "text", "--data", "."], "`cosformer data get imdb` fetches it"),
    (["train", "classify"], "data must be a table"),
    (["evaluate", "nowhere"], "run must be a folder with config.json, got nowhere"),
    (["evaluate", "."], "run must be a folder with config.json"),
]


@pytest.mark.parametrize(("command", "message"), WRONG, ids=[" ".join(c) for c, _ in WRONG])
def test_a_mistake_is_one_line_and_a_2(
    command: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert message in error
    assert not (here / "runs").exists()


def test_a_missing_package_is_named_before_the_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert cli.main(["train", "lm", "--data", "my.txt", *TINY]) == 2
    assert "pip install 'cosformer[train]'" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_recipe_then_file_then_flags_then_set(here: Path) -> None:
    (here / "a.toml").write_text(
        "seed = 1\n[optimiser]\nlr = 1.0\n[budget]\nsteps = 1\nbatch = 1\n"
    )
    given: dict[str, Any] = {"task": "lm", "device": "cpu", "config": Path("a.toml")}
    assert resolve(Options(**given)).optimiser.lr == 1.0
    config = resolve(Options(**given, steps=2, batch=2, set=("budget.batch=3",)))
    assert (config.seed, config.budget.steps, config.budget.batch) == (1, 2, 3)
    assert config.preset == recipe("lm", Setting()).preset
    (here / "c.json").write_text(json.dumps({"device": "cpu"}))
    assert resolve(Options("lm", config=Path("c.json"))).device == "cpu"
    (here / "b.toml").write_text("task.name = 'mlm'\n")
    with pytest.raises(ValueError, match="task must be that of the config, mlm, got lm"):
        resolve(Options("lm", config=Path("b.toml")))


def test_settings_name_the_folder(here: Path) -> None:
    one, same, other = (
        resolve(Options("lm", device="cpu", seed=seed)).out for seed in (None, None, 5)
    )
    assert one == same != other
    assert one.parent == Path("runs")
    assert one.name.startswith("lm-cosformer-")
    assert resolve(Options("lm", device="cpu", set=("out=here",))).out == Path("here")


def test_pretraining_is_a_flag(here: Path) -> None:
    config = resolve(Options("image", steps=7, pretrain="masked", set=("pretraining.lr=1",)))
    assert config.pretraining == Pretraining("masked", 0.5, config.budget, 1.0)
    assert config.budget.steps == 7


def test_set_reaches_what_flags_reach(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    by_set = Options(
        "lm", pretrain="masked", set=("budget.steps=7", "optimiser.lr=0.5", "device=cpu")
    )
    by_flag = Options("lm", pretrain="masked", steps=7, lr=0.5, device="cpu")
    assert resolve(by_set) == resolve(by_flag)
    assert resolve(by_set).preset == recipe("lm", Setting("cpu")).preset


@pytest.mark.parametrize(("task", "option"), [("lm", "text"), ("sst2", "data")])
def test_data_as_a_flag_wins_over_the_file(task: str, option: str, here: Path) -> None:
    (here / "a.toml").write_text(f"[task.options]\n{option} = 'other'\nlength = 8\n")
    config = resolve(Options(task, data="my.txt", config=Path("a.toml")))
    assert config.task.options[option] == str(here / "my.txt")
    assert config.task.options["length"] == 8
    last = resolve(Options(task, data="my.txt", set=(f"task.options.{option}=task.toml",)))
    assert last.task.options[option] == str(here / "task.toml")


def test_pretraining_of_the_file_outlives_the_flag(here: Path) -> None:
    (here / "a.toml").write_text("[pretraining]\nrate = 0.4\nobjective = 'masked'\n")
    config = resolve(Options("image", pretrain="causal", config=Path("a.toml"), lr=0.5))
    assert config.pretraining == Pretraining("causal", 0.4, config.budget, 0.5)
    (here / "a.json").write_text(json.dumps({"pretraining": None}))
    config = resolve(Options("image", pretrain="masked", config=Path("a.json")))
    assert config.pretraining == Pretraining("masked", 0.5, config.budget, config.optimiser.lr)


def test_a_file_is_named_in_full(here: Path) -> None:
    config = resolve(Options("lm", data="my.txt"))
    assert config.task.options["text"] == str(here / "my.txt")
    (here / "wikitext2").mkdir()  # a known name is that text, ./wikitext2 is the folder
    assert resolve(Options("lm", data="wikitext2")).task.options["text"] == "wikitext2"
    (here / "a.toml").write_text("[task.options]\ntext = './wikitext2'\ndata = 'not/yet'\n")
    options = resolve(Options("lm", config=Path("a.toml"))).task.options
    assert (options["text"], options["data"]) == (str(here / "wikitext2"), str(here / "not/yet"))


@pytest.mark.parametrize(("size", "length"), [(100, 16), (2000, 32), (10**6, 256)])
def test_the_length_fits_the_text(here: Path, size: int, length: int) -> None:
    (here / "my.txt").write_bytes(b"x" * size)
    assert resolve(Options("lm", data="my.txt", device="cpu")).task.options["length"] == length


def test_every_task_has_a_recipe() -> None:
    assert RECIPES.keys() == TASKS.keys() | KNOWN.keys()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_configs(name: str, device: str) -> None:
    config = recipe(name, Setting(device))
    assert isinstance(config, RunConfig)
    assert config.task.name == name
    replace(config)


def test_values_of_a_repeated_flag_are_gathered() -> None:
    words = ["--set", "a=1", "--steps", "3", "--set=b=2", "--set", "c=3"]
    assert gathered(words, "--set") == ["--steps", "3", "--set", "a=1", "b=2", "c=3"]
    assert gathered(["--steps", "3"], "--set") == ["--steps", "3"]


def test_a_run_of_other_steps_is_judged_as_often() -> None:
    assert resolve(Options("mqar", steps=50)).evaluation.every == 5
    assert resolve(Options("mqar", steps=3)).evaluation.every == 1
    kept = resolve(Options("mqar", steps=50, set=("evaluation.every=7",)))
    assert kept.evaluation.every == 7
