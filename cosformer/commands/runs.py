"""`cosformer runs`: the runs of a folder and how far they are."""

from dataclasses import dataclass
from pathlib import Path

from cosformer.config import build
from cosformer.recipes import RUNS
from cosformer.training import CONFIG, Place, load_config, number, state_of

POSITIONAL = "folder"
ABOUT = ("state", "message")
"""What a status has beside the place."""


@dataclass(frozen=True)
class Options:
    """List the runs below a folder: running, interrupted, finished or failed; step; best metric;
    what they started from."""

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
        except (ValueError, OSError) as error:  # one that is broken hides no other
            print(f"{folder}  unreadable: {error}")
    return 0


def line(folder: Path) -> str:
    """Folder, state, step, the best value so far and what the run started from."""
    status, config = state_of(folder), load_config(folder)
    place = build(Place, {name: status[name] for name in status if name not in ABOUT})
    before = config.pretraining if place.phase == 0 else None
    steps = (before or config).budget.steps
    best = "" if place.best is None else f"best {place.metric} {number(place.best)}"
    cells = (f"{folder!s:<40}", f"{status['state']:<11}", f"{place.step:>7,} of {steps:,}")
    start = "" if config.start is None else f"from {config.start}"
    return "  ".join(filter(None, [*cells, best, start, str(status.get("message") or "")]))
