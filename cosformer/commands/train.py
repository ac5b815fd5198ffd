"""`cosformer train TASK`: from a task to a trained model; the same command again continues."""

import hashlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cosformer import config as settings
from cosformer.bench import busy
from cosformer.check import check_threads
from cosformer.data import make
from cosformer.mechanisms import MECHANISMS
from cosformer.models import PRESETS, ModelConfig
from cosformer.recipes import RECIPES, RUNS, Setting, pretrained, recipe, tenth, use_of
from cosformer.tasks import FROM_PYTHON, TEXTS, arena, data_option, generated, options_of
from cosformer.training import (
    CONFIG,
    LAST,
    Diverged,
    Event,
    Lost,
    Objective,
    Place,
    Processes,
    Progress,
    RunConfig,
    Started,
    TaskConfig,
    Trainer,
    comparable,
    duration,
    going_on,
    inheriting,
    is_same_run,
    is_whole,
    joined,
    load_config,
    load_plugin,
    number,
    resolved,
    setting,
    shown,
    state_of,
)

POSITIONAL = "task"
REPEATED = "set"
WORDS = {"task": RECIPES, "mechanism": MECHANISMS, "preset": PRESETS}


@dataclass(frozen=True)
class Options:
    """Train a model on a task. Its recipe decides what is not said here, and takes the recommended
    model; a file (--config) changes the recipe, flags and --set change both. Stopped at any moment,
    the same command continues.

    cosformer train lm --data my.txt

    cosformer train listops --mechanism softmax --steps 2000

    cosformer train image --pretrain masked

    cosformer train sst2 --start runs/mlm

    cosformer train lm --set optimiser.clip=0.5 --set model.options.horizon=4096
    """

    task: str
    """What to learn: lm, mlm, classify, sst2, listops, image, mqar, … (docs/tasks.md)."""
    data: str | None = None
    """Your text file, folder or table, or the name of a text; for other tasks the data folder."""
    mechanism: str | None = None
    """Attention in place of the recommended one: softmax, cosformer, … as `cosformer mechanisms`
    lists them; or a pattern over the layers, as "cosformer-gated*2 softmax"."""
    preset: str | None = None
    """Size of the model: tiny, mini, small, medium, base, large, huge."""
    length: int | None = None
    """Tokens of a sequence."""
    batch: int | None = None
    """Sequences in a step."""
    steps: int | None = None
    """Updates of the parameters. With --out of a run that has fewer, that run is extended."""
    lr: float | None = None
    """The highest learning rate."""
    seed: int | None = None
    """Seed of weights, order of samples and dropout."""
    pretrain: Literal["masked", "causal"] | None = None
    """Learn from the task's own inputs first, for as many steps again."""
    start: Path | None = None
    """Folder of a run whose weights to begin with; model and vocabulary are that run's."""
    device: str | None = None
    """cpu, cuda, cuda:1; a GPU where there is one, if not given."""
    threads: int | None = None
    """CPU threads; as many as torch takes if not given. On a busy machine fewer are faster."""
    plugin: Path | None = None
    """Python file that registers mechanisms of your own; it is run before anything else."""
    wandb: bool = False
    """Show the run on Weights & Biases; with WANDB_MODE=offline, which is an environment variable,
    without an account. --set wandb=false takes back what a file says."""
    out: Path | None = None
    """Folder of the run; one in runs/ that its settings name, if not given."""
    config: Path | None = None
    """A TOML file with settings, as `[optimiser]` and `lr = 1e-3`; or a run's config.json."""
    set: tuple[str, ...] = ()
    """Any setting by its path, as budget.accumulate=4; again for each."""


def run(options: Options) -> int:
    """0 at the end of training, 1 if the run has diverged."""
    if options.threads is not None:
        torch.set_num_threads(check_threads(options.threads))
    config = resolve(options)
    try:
        with (
            joined(config.parallel, resolved(config.device)) as processes,
            processes.guarded(lambda: "the command line"),
            shown(is_first=processes.is_first),
        ):
            return _train(config, processes)
    except (Lost, Diverged) as error:
        if isinstance(error, Lost) or processes.is_first:  # all processes have diverged alike
            print(f"cosformer: train: {error}; {_kept(config)}", file=sys.stderr)
        return 1


def _train(config: RunConfig, processes: Processes) -> int:
    """Train in one of the processes of the run."""
    config = going_on(config)
    status = state_of(config.out) if is_same_run(config) else {}
    if status.get("state") == "finished" and status["step"] >= config.budget.steps:
        more = f"`--out {config.out} --steps` with more steps extends it"
        print(f"{config.out} is finished: {_summary(status)}; see `cosformer evaluate`; {more}")
        return 0
    trainer = Trainer(config, processes=processes)
    if processes.is_first:
        generate_sets(config)
    processes.wait()
    try:
        for count, event in enumerate(trainer.events()):
            if isinstance(event, Started) and count == 0 and processes.is_first:
                notes = [*event.notes, *_load(event.device, processes.count)]
                if status.get("step") and trainer.place == Place():
                    notes.append(f"{config.out} has no last checkpoint: training begins at step 0")
                for note in notes:
                    print(f"cosformer: train: {note}", file=sys.stderr)
                start = "" if config.start is None else f", from {config.start}"
                print(f"run: {config.out}{start} (the same command continues it)")
                for before, steps in itertools.pairwise(config.ends):
                    print(
                        f"extended: {before:,} steps to {steps:,}; after step {before:,} the "
                        f"learning rate is that of a run of {steps:,} steps"
                    )
                print(f"model: {_about(config, event.model)}")
            _show(event)
    except KeyboardInterrupt:
        if processes.is_first:
            print(f"\ninterrupted; {_kept(config)}", file=sys.stderr)
        raise
    print(f"finished: {_summary(vars(trainer.place))}; {config.out}")
    return 0


def resolve(options: Options) -> RunConfig:
    """Recipe, then the run to start from, then file, then flags, then --set.

    The recipe's model is the recommended one around the mechanism that any of them names. What is
    recommended gives way to what a run has that is there already: one whose config.json is the
    file, or whose folder is `out`. So an older run goes on as it was, whatever is recommended now.
    """
    if options.plugin is not None:
        load_plugin(options.plugin)
    layers = [
        {} if options.config is None else settings.load(options.config),
        _flags(options),
        settings.parse(options.set),
    ]
    device = resolved(str(_last(layers, "device") or "auto"))
    asked = Setting(
        device,
        data=_text(layers, f"task.options.{data_option(options.task)}"),
        mechanism=_text(layers, "model.mechanism"),
        pretrain=_pretrain(layers),
    )
    base, out = recipe(options.task, asked), _text(layers, "out")
    if is_whole(layers[0]):
        base = replace(base, model={})  # all of it is in the file
    elif out is not None and (Path(out) / CONFIG).is_file():
        fields = asked.model(options.task).keys()
        own = {name: value for name, value in base.model.items() if name not in fields}
        there = load_config(Path(out)).model
        kept = {name: there[name] for name in fields if name in there}
        base = replace(base, model={**own, **kept})
    config = _merged(base, options, layers)
    if out is None:
        # what the start run adds has no part in the name: the run is found when that one is gone
        config = replace(config, out=RUNS / _name(config))
    if config.start is None:
        return config
    return replace(_merged(inheriting(base, config), options, layers), out=config.out)


def _merged(config: RunConfig, options: Options, layers: Sequence[Mapping[str, Any]]) -> RunConfig:
    """The recipe's run with what was given, and what follows from it."""
    for layer in layers:
        config = settings.merge(config, layer)
    if _last(layers, "budget.steps") is not None and _last(layers, "evaluation.every") is None:
        # as often as the recipe, over other steps
        evaluation = replace(config.evaluation, every=tenth(config.budget.steps))
        config = replace(config, evaluation=evaluation)
    if options.pretrain is not None and config.pretraining is not None:
        # its defaults are those of the run that it precedes, as all layers have made it
        config = pretrained(config, options.pretrain)
        for layer in layers:
            if isinstance(given := layer.get("pretraining"), Mapping):
                config = settings.merge(config, {"pretraining": given})
    if _text(layers, "out") is not None and (config.out / CONFIG).is_file():
        config = _extending(config, load_config(config.out), layers)
    if config.task.name != options.task:
        raise ValueError(f"task must be that of the config, {config.task.name}, got {options.task}")
    start, plugin = (None if p is None else p.resolve() for p in (config.start, config.plugin))
    task = _in_full(config.task, is_there=(config.out / CONFIG).is_file())
    return replace(config, task=task, start=start, plugin=plugin)


def _extending(
    config: RunConfig, there: RunConfig, layers: Sequence[Mapping[str, Any]]
) -> RunConfig:
    """What follows from the first steps of a run stays as it is there when it gets other steps.

    It gets other steps where they are asked for, not where the recipe has others.
    """
    if _last(layers, "budget.steps") is None:
        config = replace(config, budget=replace(config.budget, steps=there.budget.steps))
    elif config.budget.steps == there.budget.steps and not there.extended:
        return config
    if _last(layers, "evaluation.every") is None:
        evaluation = replace(config.evaluation, every=there.evaluation.every)
        config = replace(config, evaluation=evaluation)
    before, kept = config.pretraining, there.pretraining
    if before and kept and _last(layers, "pretraining.budget") is None:
        config = replace(config, pretraining=replace(before, budget=kept.budget))
    return config


def _flags(options: Options) -> dict[str, Any]:
    """The flags that were given, as nested settings."""
    paths = {
        "mechanism": "model.mechanism",
        "preset": "preset",
        "length": "task.options.length",
        "batch": "budget.batch",
        "steps": "budget.steps",
        "lr": "optimiser.lr",
        "seed": "seed",
        "pretrain": "pretraining.objective",
        "device": "device",
    }
    given = {path: getattr(options, flag) for flag, path in paths.items()}
    found = settings.parse(f"{path}={value}" for path, value in given.items() if value is not None)
    # a path is never read as a number, nor as none
    names = ("start", "out", "plugin")
    found |= {name: str(path) for name in names if (path := getattr(options, name)) is not None}
    if options.wandb:
        found["wandb"] = True
    if options.data is not None:
        inner = found.setdefault("task", {}).setdefault("options", {})
        inner[data_option(options.task)] = options.data
    return found


def _last(layers: Sequence[Mapping[str, Any]], path: str) -> Any:
    """What the last layer with this setting says; None: none has it."""
    found = (setting(layer, path) for layer in reversed(layers))
    return next((value for value in found if value is not None), None)


def _text(layers: Sequence[Mapping[str, Any]], path: str) -> str | None:
    """What the last layer with this setting says, if that is text; else it is refused later."""
    found = _last(layers, path)
    return found if isinstance(found, str) else None


def _pretrain(layers: Sequence[Mapping[str, Any]]) -> Objective | None:
    """What is learnt before the task, as far as these settings say; None: nothing."""
    if not isinstance(_last(layers, "pretraining"), Mapping):
        return None
    return "causal" if _last(layers, "pretraining.objective") == "causal" else "masked"


def _about(config: RunConfig, model: ModelConfig) -> str:
    """What attention the run has, and whether that is what is recommended."""
    objective = None if config.pretraining is None else config.pretraining.objective
    wanted = Setting(pretrain=objective).model(config.task.name)
    schemes = model.position_schemes(causal=model.kind == "decoder")
    values = {name: getattr(model, name) for name in wanted}
    told = {
        name: "yes" if value is True else "auto" if value is None else str(value or "none")
        for name, value in values.items()
    }
    told["positions"] = " ".join(dict.fromkeys(schemes.values()))
    mechanism = told.pop("mechanism")
    found = ", ".join([mechanism, *(f"{name} {value}" for name, value in told.items())])
    if any(getattr(model, name) != value for name, value in wanted.items()):
        return found
    return f"{found}, as recommended for {use_of(config.task.name)} (--mechanism takes another)"


def _in_full(task: TaskConfig, *, is_there: bool) -> TaskConfig:
    """With whole paths, so that a run can be continued and judged from any folder.

    `is_there`: whether the run is there already. Then a text that is missing was a file, whose path
    the run has; else it may also be a slip in a name, which is told as it was typed.
    """
    options = ("data", data_option(task.name))
    for option in options:
        if task.options.get(option) == "":  # which would be the folder that one is in
            raise ValueError(f"task.options.{option} (--data) must be a path or a name, got ''")
    paths = {
        option: str(Path(value).resolve())
        for option in options
        if isinstance(value := task.options.get(option), str)
        and (
            option == "data"
            or (value not in (*FROM_PYTHON, *TEXTS) and (is_there or Path(value).exists()))
        )
    }
    return replace(task, options={**task.options, **paths})


def _name(config: RunConfig) -> str:
    """Name of the run's folder, made of its settings; a setting left at its default has no part."""
    given = comparable(settings.plain(config))
    left_alone = {
        each.name for each in fields(config) if getattr(config, each.name) == each.default
    }
    known = json.dumps({key: given[key] for key in given.keys() - left_alone}, sort_keys=True)
    pattern = str(config.model.get("mechanism", "cosformer"))
    kind = "-".join(pattern.replace("*", "x").split())  # a name that no shell takes apart
    if config.start is not None:
        kind = f"from-{config.start.name}"
    return f"{config.task.name}-{kind}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def generate_sets(config: RunConfig) -> None:
    """Generate the data sets that the task needs and the data folder lacks, on all cores."""
    options = options_of(config.task.name, config.task.options)
    seed, data = options.get("seed", 0), options.get("data")
    for name, count in arena.sets_of(config.task.name, options).items():
        if not generated.path_of(name, data, count=count, seed=seed).exists():
            print(f"{name}: {count:,} samples are generated first, and kept")
            make.run(make.Options((name,), count=count, seed=seed, data=data))


def _load(device: str, processes: int) -> list[str]:
    """A warning where other processes than the run's keep the cores busy that it needs on a CPU."""
    warning = busy(torch.get_num_threads()) if device == "cpu" and processes == 1 else None
    return [] if warning is None else [warning]


def _show(event: Event) -> None:
    """On a terminal progress stays on one line."""
    is_terminal = sys.stdout.isatty()
    stays = is_terminal and isinstance(event, Progress)
    begin = "\r\x1b[K" if is_terminal else ""  # over what stood there
    print(f"{begin}{event}", end="" if stays else "\n", flush=True)


def _summary(place: Mapping[str, Any]) -> str:
    best = "" if place["best"] is None else f", best {place['metric']} {number(place['best'])}"
    return f"{place['step']:,} steps in {duration(place['seconds'])}{best}"


def _kept(config: RunConfig) -> str:
    if not (config.out / LAST).exists():
        return f"no checkpoint yet in {config.out}"
    return f"the checkpoint of step {state_of(config.out)['step']:,} is in {config.out}"
