"""A run's model and task again, to be judged or used."""

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cosformer.config import build, plain
from cosformer.models import Model, ModelConfig
from cosformer.tasks import Names, Task, Vocabulary, has_vocabulary, restore
from cosformer.training.checkpoints import (
    Checkpoint,
    load_weights,
    put,
    read,
    require_like,
    weights,
)
from cosformer.training.config import RunConfig
from cosformer.training.device import resolved
from cosformer.training.fingerprint import require_same
from cosformer.training.folder import (
    CONFIG,
    LABELS,
    LAST,
    TOKENIZER,
    VOCABULARY,
    load_config,
    located,
    read_json,
    write_json,
)
from cosformer.training.learner import create
from cosformer.training.place import Place, place_of
from cosformer.training.plugin import load_plugin
from cosformer.training.possible import outline

CHECKPOINTS = ("best", "last")
LABELS_FORMAT = 1
"""Number of the layout of labels.json; raised when old files can no longer be read as they are."""
HARMLESS = 2**22
"""Numbers of a tensor that may be made even where a checkpoint has fewer in all."""
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""Functions by which models make tensors; their first arguments are sizes."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and where it comes from."""

    model: Model
    folder: Path
    config: RunConfig
    place: Place
    """Where the run stood when the checkpoint was written."""
    device: str

    @cached_property
    def task(self) -> Task:
        """The task with its data, read on first use: generating text needs none."""
        task = create_task(self.config, self.folder, self.device)
        require_same(self.folder, task)  # metrics on other data would say nothing about the run
        return task

    @property
    def vocabulary(self) -> Vocabulary:
        """How the model's tokens are written; the data are not needed for it."""
        if (found := kept_vocabulary(self.folder)) is not None:
            return found
        name = self.config.task.name
        if has_vocabulary(name):
            raise ValueError(
                f"run must have its file {VOCABULARY} or {TOKENIZER}, got {self.folder} without"
            )
        raise ValueError(f"run must be of a task on text to have a vocabulary, got {name}")


def create_task(config: RunConfig, folder: Path, device: str) -> Task:
    """The task of a run, with the vocabulary that `folder` keeps.

    It is the run's own, or that of the run that it starts from; where there is none, the task
    learns one.
    """
    task = config.task
    if not has_vocabulary(task.name):
        return task.create(device)
    learnt = kept_vocabulary(folder)
    if learnt is not None and config.start is None:  # a text may have fewer pairs than asked for
        task = replace(task, options={**task.options, **options_of_vocabulary(learnt)})
    return task.create(device, learnt)


def options_of_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    """The options by which a task asks for a vocabulary."""
    is_learnt = vocabulary.kind == "bpe"
    return {"tokens": vocabulary.kind, "vocabulary": vocabulary.size if is_learnt else None}


def keep_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Write how a run's tokens are written, so that they need no data later."""
    name = TOKENIZER if vocabulary.kind == "bpe" else VOCABULARY
    write_json(folder / name, vocabulary.plain())


def kept_vocabulary(folder: Path) -> Vocabulary | None:
    """How tokens are written in the run of a folder, where they are those of a text.

    Runs from before `tokenizer.json` have their byte pairs in `vocabulary.json`.
    """
    for path in (folder / TOKENIZER, folder / VOCABULARY):
        if path.is_file():
            return restore(read_json(path))
    return None


def keep_names(folder: Path, names: Names) -> None:
    """Write what a run's classes and columns are called, so that they need no data later."""
    columns, labels = list(names.columns), list(names.labels)
    write_json(folder / LABELS, {"format": LABELS_FORMAT, "columns": columns, "labels": labels})


def kept_names(folder: Path) -> Names | None:
    """What the run of a folder calls its classes and columns; None: it does not say."""
    path = folder / LABELS
    if not path.is_file():
        return None
    found = read_json(path)
    if found.get("format") != LABELS_FORMAT:
        raise ValueError(f"{path} must have format {LABELS_FORMAT}, got {found.get('format')!r}")
    for name in ("labels", "columns"):
        given = found.get(name)
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise ValueError(f"{name} in {path} must be a list of texts, got {given!r}")
    return Names(tuple(found["labels"]), tuple(found["columns"]))


def load(
    run: Path | str,
    checkpoint: str = "best",
    *,
    device: str = "auto",
    plugin: Path | None = None,
    data: str | None = None,
) -> Loaded:
    """The model that a run's checkpoint holds: `best` on validation, or the `last`.

    A file that registers the run's mechanism is run first: `plugin`, else the one that the run's
    config names, whose path is then printed on stderr before. `data`: where the run's data are
    now; None: where they were.
    """
    folder = Path(run)
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    config = load_config(folder)
    if data is not None:
        config = replace(config, task=located(config.task, data))
    path = folder / f"{checkpoint}.safetensors"
    if not path.is_file():
        raise ValueError(_missing(folder, checkpoint))
    found = read(path)
    place = place_of(found, path, config)
    _load_plugin(folder, plugin, config.plugin)
    stored = found.part("average") or found.part("model")
    model = _create(model_of(found, path), stored, path)
    load_weights(model, stored, str(path))
    where = resolved(device)
    model.to(where).eval()
    return Loaded(model, folder, config, place, where)


def export_weights(model: Model, path: Path) -> None:
    """One file of safetensors with all weights, by the names that the model has for them.

    A tensor that has two names is there once, as `safetensors.torch.load_model` wants it. The
    model's config is JSON in the file's metadata, as `model`.
    """
    tensors = {name: each.cpu().contiguous() for name, each in weights(model).items()}
    put(path, tensors, {"format": "pt", "model": json.dumps(plain(model.config))})


def _load_plugin(folder: Path, given: Path | None, kept: Path | None) -> None:
    """Run the file that was given, else the one that the run was trained with."""
    if given is not None:
        load_plugin(given)
    elif kept is not None:
        if not (kept.is_absolute() and kept.is_file()):  # a relative one could be anybody's file
            raise ValueError(
                f"plugin of {folder} must be an absolute path of a file, got {kept}: "
                "--plugin says where it is"
            )
        # the file is code, and nobody named it in this call
        print(f"cosformer: running the plugin {kept}, as {folder / CONFIG} says", file=sys.stderr)
        load_plugin(kept)


def model_of(found: Checkpoint, path: Path) -> ModelConfig:
    """The config of the model that a checkpoint holds; nothing is built."""
    given = found.facts.get("model")
    if not isinstance(given, dict):
        raise ValueError(f"checkpoint {path} must say what its model is, got {given!r}")
    try:
        return build(ModelConfig, given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"checkpoint {path} must say what its model is: {error}") from None


def _create(config: ModelConfig, stored: Mapping[str, Tensor], path: Path) -> Model:
    """The model, once its sizes are found to be those of the stored tensors.

    A forged config may say any size: no memory is taken for what the tensors do not have.
    """
    if config.layers > len(stored):
        raise ValueError(
            f"checkpoint {path} must hold the model that it describes, got {config.layers:,} "
            f"layers with {len(stored):,} tensors"
        )
    limit = max(HARMLESS, sum(tensor.numel() for tensor in stored.values()))
    try:
        with _Bounded(limit):
            with contextlib.suppress(RuntimeError):  # a mechanism that reads its numbers
                require_like(stored, weights(outline(config)), str(path))
            return create(config)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"checkpoint {path} must hold the model that it describes: {error}"
        ) from None


class _Bounded(TorchFunctionMode):
    """Refuses to make a tensor of more than so many numbers."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in FACTORIES:
            sizes = given.get("size", args[0] if args and not isinstance(args[0], int) else args)
            count = math.prod(size for size in sizes if isinstance(size, int))
            if count > self.limit:
                raise ValueError(
                    f"a tensor must have at most {self.limit:,} numbers, got {count:,}"
                )
        return func(*args, **given)


def _missing(folder: Path, checkpoint: str) -> str:
    """What to do about a checkpoint that is not there."""
    message = f"run must have the checkpoint {checkpoint}, got {folder}"
    if checkpoint == "best" and (folder / LAST).is_file():
        return f"{message}, which was not judged yet: take the last one (--checkpoint last)"
    return f"{message}, which has none yet: the command that began it continues it"
