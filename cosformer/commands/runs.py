"""`cosformer runs`: the runs of a folder and how far they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosformer.recipes.setting import RUNS
from cosformer.training.folder import CONFIG, read_json, state_of

POSITIONAL = "folder"


@dataclass(frozen=True)
class Options:
    """List the runs below a folder: running, interrupted, finished or failed; step; best metric."""

    folder: Path = RUNS
    """Folder that holds the folders of runs."""


def run(options: Options) -> int:
    if not options.folder.is_dir():
        raise ValueError(f"folder must be there, got {options.folder}")
    found = sorted(path.parent for path in options.folder.glob(f"**/{CONFIG}"))
    if not found:
        print(f"no runs in {options.folder}")
    for folder in found:
        try:
            print(line(folder))
        except ValueError as error:  # one that is broken hides no other
            print(f"{folder}  unreadable: {error}")
    return 0


def line(folder: Path) -> str:
    """Folder, state, step and the best value so far."""
    status, config = state_of(folder), read_json(folder / CONFIG)
    steps = _steps(config, status.get("phase", 0))
    best = "" if status.get("best") is None else f"best {status['metric']} {status['best']:.4f}"
    message = status.get("message") or ""
    cells = (f"{folder!s:<40}", f"{status['state']:<11}", f"{status['step']:>7,} of {steps:,}")
    return "  ".join([*cells, best, message]).rstrip()


def _steps(config: dict[str, Any], phase: int) -> int:
    before = config.get("pretraining")
    of_phase = before if before is not None and phase == 0 else config
    steps: int = of_phase["budget"]["steps"]
    return steps
