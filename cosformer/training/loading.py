"""A run's model and task again, to be judged or used."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cosformer.config import build
from cosformer.models import ModelConfig
from cosformer.models.create import Model
from cosformer.tasks import Task
from cosformer.tasks.table import has_vocabulary
from cosformer.tasks.vocabulary import Vocabulary, restore
from cosformer.training.checkpoint import Checkpoint, load_weights, read
from cosformer.training.config import RunConfig
from cosformer.training.device import resolved
from cosformer.training.fingerprint import require_same
from cosformer.training.folder import VOCABULARY, load_config, read_json
from cosformer.training.learner import create
from cosformer.training.place import Place, place_of

CHECKPOINTS = ("best", "last")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and where it comes from."""

    model: Model
    folder: Path
    config: RunConfig
    place: Place
    """Of the checkpoint."""
    device: str

    @cached_property
    def task(self) -> Task:
        """Read when it is first asked for: not all that a model is used for needs the data."""
        task = create_task(self.config, self.folder, self.device)
        require_same(self.folder, task)  # numbers of other data would say nothing of the run
        return task

    @property
    def vocabulary(self) -> Vocabulary:
        """How the model's tokens are written; the data are not needed for it."""
        if (found := kept_vocabulary(self.folder)) is None:
            raise ValueError(
                f"run must be of a task on text to have a vocabulary, got {self.config.task.name}"
            )
        return found


def create_task(config: RunConfig, folder: Path, device: str) -> Task:
    """The task of a run; one that started from another has its vocabulary, as `folder` keeps it."""
    has_learnt = config.start is not None and has_vocabulary(config.task.name)
    return config.task.create(device, kept_vocabulary(folder) if has_learnt else None)


def kept_vocabulary(folder: Path) -> Vocabulary | None:
    """How tokens are written in the run of a folder, where they are those of a text."""
    path = folder / VOCABULARY
    return restore(read_json(path)) if path.is_file() else None


def load(run: Path | str, checkpoint: str = "best", *, device: str = "auto") -> Loaded:
    """The model that a run's checkpoint holds: `best` on validation, or the `last`."""
    folder = Path(run)
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    config = load_config(folder)
    path = folder / f"{checkpoint}.safetensors"
    if not path.is_file():
        raise ValueError(f"run must have the checkpoint {checkpoint}, got {folder}, without it yet")
    found = read(path)
    model = _model(found, path)
    load_weights(model, found.part("average") or found.part("model"), str(path))
    where = resolved(device)
    model.to(where).eval()
    return Loaded(model, folder, config, place_of(found, path), where)


def _model(found: Checkpoint, path: Path) -> Model:
    given = found.facts.get("model")
    if not isinstance(given, dict):
        raise ValueError(f"checkpoint {path} must say what its model is, got {given!r}")
    try:
        return create(build(ModelConfig, given))
    except ValueError as error:
        raise ValueError(f"checkpoint {path} must say what its model is: {error}") from None
