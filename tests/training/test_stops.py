"""What stops a run, and what is left then: nothing that was kept is lost."""

import collections
import errno
import functools
import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training_cases as cases

from cosformer import training
from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, create_model
from cosformer.training import load, possible, train, trainer
from cosformer.training.checkpoints import parts
from cosformer.training.folder import adopt, state_of


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run(config, where, monkeypatch):
    """The message says step and group; the last checkpoint is from before."""
    config = replace(config, save_seconds=0.0)
    cases.poison(monkeypatch, where, step=13)
    with pytest.raises(training.Diverged, match=r"step 14 of training: .* not finite") as caught:
        train(config)
    named = [part in str(caught.value) for part in ("loss", "of matrices", "gradient of vectors")]
    assert named == [where == "loss", where == "loss", True]
    status = state_of(config.out)
    assert (status["state"], "step 14" in status["message"]) == ("failed", True)
    assert load(config.out, "last").place.step == status["step"] == 13
    assert all(t.isfinite().all() for t in cases.tensors(config.out / "last.safetensors").values())


def test_weights_that_are_not_finite_are_not_kept(config):
    """A step may be fine and what it leaves is not."""
    constant = training.Schedule("constant", warmup=0)
    steep = {"optimiser": training.Optimiser(lr=1e38), "schedule": constant}
    with pytest.raises(training.Diverged, match=r"step 1 of training: weights of .* not finite"):
        train(replace(config, save_seconds=0.0, **steep))
    assert not (config.out / "last.safetensors").exists()
    assert state_of(config.out)["step"] == 0


@pytest.mark.parametrize("rate", [1e6, 1e30])
def test_numbers_that_a_mechanism_refuses_because_they_are_nan_are_a_divergence(config, rate):
    """A gate of NaN is found by the mechanism before a loss is: in a step, or while judging."""
    model = {"mechanism": "cosformer-gated", "layers": 2, "width": 16, "heads": 2}
    settings = {"optimiser": training.Optimiser(lr=rate), "model": model, "log_every": 100}
    with pytest.raises(
        training.Diverged, match=r"training: the model has diverged: log_decay .*, got nan"
    ):
        train(replace(config, **settings))


def test_a_loss_on_validation_that_is_not_finite_is_a_divergence(config, monkeypatch):
    normal = trainer.evaluate
    monkeypatch.setattr(
        trainer, "evaluate", lambda *a, **k: normal(*a, **k) | {"loss": float("inf")}
    )
    with pytest.raises(training.Diverged, match="of training: loss on validation not finite"):
        train(config)
    assert not (config.out / "best.safetensors").exists()


def test_tensorboard_gets_what_the_log_gets(config, monkeypatch):
    shown = {}

    def writer(folder, purge_step):
        assert purge_step == 1
        into = shown.setdefault(Path(folder).name, collections.defaultdict(list))
        add = lambda name, value, step: into[name].append((step, value))  # noqa: E731
        return types.SimpleNamespace(add_scalar=add, close=lambda: None)

    module = types.SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    train(replace(config, tensorboard=True, pretraining=cases.pretraining()))
    rows = cases.log(config.out)
    for phase in ("pretraining", "training"):
        losses = [(r["step"], r["loss"]) for r in rows if r["phase"] == phase and "loss" in r]
        assert shown[phase]["loss"] == losses
    assert [step for step, _ in shown["training"]["valid/accuracy"]] == [8, 16, 24]


def test_wandb_gets_what_the_log_gets_and_goes_on_with_the_same_run(config, monkeypatch):
    begun, logged, metrics, ended = [], [], [], []

    def init(**given):
        begun.append(given)
        return types.SimpleNamespace(
            define_metric=lambda name, step_metric=None: metrics.append((name, step_metric)),
            log=logged.append,
            finish=lambda: ended.append(1),
        )

    fake = types.SimpleNamespace(init=init, Error=LookupError)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = replace(config, wandb=True, pretraining=cases.pretraining())
    train(config)
    train(replace(config, budget=replace(config.budget, steps=27)))
    assert (len(begun), len(ended)) == (2, 2)  # both phases are one run of theirs
    assert begun[0]["id"] == begun[1]["id"]
    assert (begun[0]["resume"], begun[0]["name"], begun[0]["config"]["seed"]) == ("allow", "run", 0)
    assert ("pretraining/*", "pretraining/step") in metrics
    rows = cases.log(config.out)
    for phase in ("pretraining", "training"):
        told = [(r["step"], r["loss"]) for r in rows if r["phase"] == phase and "loss" in r]
        name = f"{phase}/loss"
        assert [(x[f"{phase}/step"], x[name]) for x in logged if name in x] == told
    steps = [each["training/step"] for each in logged if "training/valid/accuracy" in each]
    assert steps == [8, 16, 24, 27]


def test_a_run_that_wandb_does_not_take_is_one_error(config, monkeypatch):
    def init(**_):
        raise LookupError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Error=LookupError))
    with pytest.raises(ValueError, match="no API key; WANDB_MODE=offline needs no account"):
        train(replace(config, wandb=True))


def fill_the_disk(monkeypatch, is_full):
    """Checkpoints are written until the path of one is given for which it is full."""
    write = parts.replacing

    def replacing(path):
        if is_full(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path)

    monkeypatch.setattr(parts, "replacing", replacing)


def test_a_full_disk_keeps_the_last_checkpoint(config, whole, monkeypatch):
    config, calls = replace(config, save_seconds=0.0), iter(range(10**6))
    fill_the_disk(monkeypatch, lambda path: next(calls) >= 5)
    with pytest.raises(OSError, match="No space left") as caught:
        train(config)
    monkeypatch.undo()
    assert "the one before it is kept" in str(caught.value)
    assert (caught.value.errno, state_of(config.out)["state"]) == (errno.ENOSPC, "failed")
    assert load(config.out, "last").place.step == state_of(config.out)["step"] == 5
    train(config)
    cases.assert_same_outcome(config.out, whole)


def test_the_status_tells_of_what_is_kept_alone(config, monkeypatch):
    """Of a checkpoint that was not written: not its phase, its best value, nor its metrics."""
    config = replace(config, pretraining=cases.pretraining(), save_seconds=1e9)
    late = lambda: state_of(config.out)["step"] == 10  # noqa: E731
    fill_the_disk(monkeypatch, lambda path: path.name == "last.safetensors" and late())
    with pytest.raises(OSError, match="No space left"):
        train(config)
    status, kept = state_of(config.out), vars(load(config.out, "last").place)
    assert {name: status[name] for name in kept} == kept
    assert (kept["phase"], kept["step"]) == (0, 10)


def test_the_folder_of_another_run_is_left_alone(finished):
    before = (finished.out / "last.safetensors").read_bytes()
    with pytest.raises(
        ValueError, match=r"budget.steps = 24, here it is 25 and 1 more setting differs$"
    ):
        train(replace(finished, budget=training.Budget(steps=25, batch=8), seed=1))
    assert (finished.out / "last.safetensors").read_bytes() == before


def test_a_run_goes_on_elsewhere_and_with_settings_that_are_newer_than_it(finished, tmp_path):
    """Where it is and how often it is saved may change; what its config lacks is as by default."""
    finished.out.rename(tmp_path / "moved")
    again = replace(finished, out=tmp_path / "moved", save_seconds=5.0, device="auto")
    path = again.out / "config.json"
    kept = json.loads(path.read_text())
    del kept["seed"], kept["optimiser"]["eps"]
    path.write_text(json.dumps(kept))
    assert train(again).place.step == 24
    with pytest.raises(ValueError, match="seed = 0, here it is 1"):
        train(replace(again, seed=1))


CONFIGS = ('{"architectures": ["Bert"]}', '{"task": 3}')
FOREIGN = [("config.json", text, "json must be the config of a run: ") for text in CONFIGS]
FOREIGN += [("config.json", "[]", "^[^ ]*config.json must hold an object, got list$")]
FOREIGN += [("config.json", "{", "^[^ ]*config.json must be JSON: Expecting property name")]
FOREIGN += [
    ("config.json", "[" * 50_000, "^[^ ]*config.json must be JSON: maximum recursion depth")
]
FOREIGN += [("thesis.tex", "all my work", "out must be a run or an empty folder, .* thesis.tex")]


@pytest.mark.parametrize(("name", "content", "rule"), FOREIGN)
def test_a_folder_of_something_else_is_refused_and_left_alone(config, name, content, rule):
    config.out.mkdir()
    (config.out / name).write_text(content)
    with pytest.raises(ValueError, match=rule):
        train(config)
    assert {path.name: path.read_text() for path in config.out.iterdir()} == {name: content}


def test_one_process_at_a_time_works_in_a_run(config):
    events = training.Trainer(config).events()
    next(events)
    assert state_of(config.out)["state"] == "running"
    with pytest.raises(ValueError, match="nobody works in"):
        train(config)
    events.close()
    assert state_of(config.out)["state"] == "interrupted"


@pytest.mark.parametrize("log", [None, b"", b"[]\n", b'{"phase": 3}\n', b'{"step": "x"', b"\xff\n"])
def test_a_log_that_was_lost_or_changed_stops_nothing(finished, log):
    path = finished.out / "log.jsonl"
    path.unlink() if log is None else path.write_bytes(log)
    assert train(finished).place.step == 24
    assert path.read_bytes() == b""


WRONG = [
    ({"model": {"options": {"horizon": "far"}}}, "horizon"),
    ({"model": {"widht": 3}}, "model must be one of kind, .*, got 'widht'"),
    ({"save_seconds": float("nan")}, "save_seconds must be at least 0, got nan"),
    ({"graph": True}, "graph must be false on cpu"),
    ({"task": training.TaskConfig("image", {"data": "nowhere"})}, "cosformer data get image"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_setting_is_named_before_a_folder_is_made(config, given, message):
    with pytest.raises(ValueError, match=message):
        train(replace(config, **given))
    assert not config.out.exists()


NO_AMOUNTS = [
    (training.Budget, {"steps": 1.5}, TypeError, r"steps must be a whole .* 1 on, got 1\.5"),
    (training.Evaluation, {"batches": True}, TypeError, "batches must be a whole .*, got True"),
    (
        functools.partial(cases.config, Path("run")),
        {"log_every": "2"},
        TypeError,
        "log_every .*got '2'",
    ),
    (training.Optimiser, {"weight_decay": float("nan")}, ValueError, "finite .* 0, got nan"),
    (training.Optimiser, {"weight_decay": -1.0}, ValueError, "weight_decay .* 0, got -1.0"),
    (training.Pretraining, {"rate": 2.0}, ValueError, "rate must lie above 0 and up to 1, got 2"),
]


@pytest.mark.parametrize(("make", "given", "error", "message"), NO_AMOUNTS)
def test_what_is_no_amount_is_refused(make, given, error, message):
    with pytest.raises(error, match=message):
        make(**given)


NO_SECTIONS = [
    ({"task": "lm"}, "task must be of the class TaskConfig, got str"),
    ({"budget": {"steps": 2}}, "budget must be of the class Budget, got dict"),
    ({"optimiser": 1e-3}, "optimiser must be of the class Optimiser, got float"),
    ({"pretraining": "masked"}, "pretraining must be of the class Pretraining, got str"),
    ({"model": None}, "model must be a mapping, got NoneType"),
]


@pytest.mark.parametrize(("given", "message"), NO_SECTIONS)
def test_a_section_of_another_type_is_refused(config, given, message):
    with pytest.raises(TypeError, match=message):
        replace(config, **given)


def test_what_is_no_config_is_refused(config):
    with pytest.raises(TypeError, match="config must be a RunConfig, got dict"):
        train({"task": "lm"})
    with pytest.raises(TypeError, match="name must be a string, got NoneType"):
        training.TaskConfig(None)
    with pytest.raises(TypeError, match="options must be a mapping, got list"):
        training.TaskConfig("lm", ["my.txt"])


def test_pretraining_that_does_not_fit_is_refused(config, tmp_path):
    task = cases.table(tmp_path, ["0\tab", "1\tba"] * 20, 4)
    model = {"mechanism": "linformer", "pooling": "cls", "options": {"projected": 2}}
    before = training.Pretraining("masked", rate=1.0, budget=training.Budget(steps=2, batch=2))
    with pytest.raises(ValueError, match="what was learnt before must fit the model"):
        train(replace(config, task=task, model=model, pretraining=before))
    assert not config.out.exists()


@pytest.fixture
def short(config, tmp_path):
    """Texts of up to 4 bytes where 100 are allowed, by a mechanism for 100."""
    lines = [f"{n % 2}\t{'ab'[n % 2] * (1 + n % 4)}" for n in range(40)]
    task = cases.table(tmp_path, lines, 100)
    return replace(config, task=task, model={**config.model, "options": {"horizon": 100}})


def with_model(config, **changes):
    return replace(config, model={**config.model, **changes})


def test_a_mechanism_for_fewer_tokens_is_refused(short):
    for changes in ({"options": {"horizon": 99}}, {"pooling": "cls"}):  # a cls is one more
        with pytest.raises(ValueError, match=r"allow the 10\d tokens of training, got cosformer"):
            train(with_model(short, **changes))
        assert not short.out.exists()
    assert train(short).place.step == 24


def test_a_run_that_is_there_goes_on_as_it_began(short):
    config = with_model(short, options={"horizon": 64})  # no batch is wider
    config.out.mkdir()
    adopt(config)
    assert train(config).place.step == 24


@pytest.mark.parametrize("name", ["cosformer", "performer", "bigbird", "linformer", "reformer"])
def test_no_weights_are_drawn_to_ask(name):
    kind = "decoder" if MECHANISMS[name].traits.causal != "no" else "masked-lm"
    config = ModelConfig(kind=kind, mechanism=name, max_length=32, layers=1, width=8)
    found = possible.outline(config)
    assert all(parameter.is_meta for parameter in found.parameters())
    shapes = {key: tensor.shape for key, tensor in create_model(config).state_dict().items()}
    assert {key: tensor.shape for key, tensor in found.state_dict().items()} == shapes


@pytest.mark.slow
def test_no_compiler_is_imported_to_ask():
    code = (
        "import sys\n"
        "from cosformer.models import ModelConfig, recommended\n"
        "from cosformer.training.possible import outline\n"
        "outline(ModelConfig(layers=1, width=8, heads=2, **recommended('lm')))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_mechanism_may_read_its_numbers(config, monkeypatch):
    class Reading(MECHANISMS["softmax"]):
        def __init__(self, heads, width, *, key_heads=None):
            super().__init__(heads, width, key_heads=key_heads)
            self.number = torch.ones(()).item()

    monkeypatch.setitem(MECHANISMS, "reading", Reading)
    assert train(with_model(config, mechanism="reading")).place.step == 24


TEXT = [f"{n} green bottles hanging on the wall" for n in range(100)]
TABLE = ["label\ttext", *(f"{n % 2}\t{'ab'[n % 2] * 5} {n}" for n in range(100))]
DATA = {
    "other text": ({"tokens": "bytes"}, TEXT, ["that is the question"] * 100),
    "other words": ({"tokens": "words"}, TEXT, ["that is the question of many words"] * 100),
    "two lines of a text in turn": ({}, TEXT, [*TEXT[:40], TEXT[41], TEXT[40], *TEXT[42:]]),
    "the last lines of a text in turn": ({}, TEXT, [*TEXT[:-2], TEXT[-1], TEXT[-2]]),
    "two rows of a table in turn": ({}, TABLE, [*TABLE[:40], TABLE[41], TABLE[40], *TABLE[42:]]),
    "a letter of a table": ({}, TABLE, [*TABLE[:-1], TABLE[-1].replace("b", "c", 1)]),
}


@pytest.mark.parametrize("case", DATA)
def test_a_run_neither_goes_on_with_other_data_nor_is_judged_by_them(config, tmp_path, case):
    """However few bytes of a file have changed."""
    options, lines, others = DATA[case]
    path = tmp_path / ("my.txt" if lines is TEXT else "my.tsv")
    name, option = ("lm", "text") if lines is TEXT else ("classify", "data")
    task = training.TaskConfig(name, {**options, option: str(path), "length": 8})
    config = replace(config, task=task, budget=training.Budget(steps=2, batch=2))
    path.write_text("\n".join(lines))
    train(config)
    before = (config.out / "data.json").read_bytes()
    path.write_text("\n".join(others))
    for use in (lambda: train(config), lambda: load(config.out).task):
        with pytest.raises(ValueError, match=r"data must be those that the run .* began with"):
            use()
    assert (config.out / "data.json").read_bytes() == before
    path.write_text("\n".join(lines))
    assert train(config).place.step == 2


def test_a_run_goes_on_and_is_judged_where_its_data_are_now(config, tmp_path):
    """If they are the same; a run without `data.json` cannot tell, and is refused."""
    old, new = (tmp_path / name / "my.txt" for name in ("old", "new"))
    old.parent.mkdir()
    old.write_text("\n".join(TEXT))
    task = training.TaskConfig("lm", {"text": str(old), "length": 8})
    config = replace(config, task=task, budget=training.Budget(steps=2, batch=2))
    train(config)
    old.parent.rename(new.parent)
    longer = replace(config, budget=training.Budget(steps=3, batch=2))
    there = replace(longer, task=replace(task, options={"text": str(new), "length": 8}))
    kept = new.read_text()
    new.write_text(kept.replace("7", "8"))
    for use in (lambda: train(there), lambda: load(config.out, data=str(new)).task):
        with pytest.raises(
            ValueError, match=rf"data must be those .* bring the old data back \({old}\), or"
        ):
            use()
    new.write_text(kept)
    assert load(config.out, data=str(new)).task.sizes
    assert train(there).place.step == 3
    assert load(config.out).task.sizes  # the run knows
    (config.out / "data.json").unlink()
    new.parent.rename(old.parent)
    with pytest.raises(ValueError, match=rf"task.options.text = '{new}', here it is '{old}'"):
        train(longer)
