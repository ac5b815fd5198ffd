"""`cosformer runs`: the runs of a folder and how far they are."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cosformer.check import check_folder, check_new_file
from cosformer.config import build
from cosformer.recipes import RUNS
from cosformer.report import Curves, runs_figure, write_whole
from cosformer.training import CONFIG, LOG, Place, load_config, number, read_json, state_of

POSITIONAL = "folder"
FORMATS = ("svg", "png", "pdf")
ABOUT = ("state", "message")
"""What a status has beside the place."""


@dataclass(frozen=True)
class Options:
    """List the runs below a folder: running, interrupted, finished or failed; step; best metric;
    what they started from. With --plot, their losses as a picture as well.

    cosformer runs --plot losses.svg
    """

    folder: Path = RUNS
    """Folder that holds the folders of runs."""
    plot: Path | None = None
    """Picture to write, .svg, .png or .pdf: loss in training and on validation against steps."""

    def __post_init__(self) -> None:
        if self.plot is not None and check_new_file("plot", self.plot).suffix[1:] not in FORMATS:
            raise ValueError(f"plot must end in .{', .'.join(FORMATS)}, got {self.plot}")


def run(options: Options) -> int:
    check_folder("folder", options.folder)
    named = sorted(path.parent for path in options.folder.glob(f"**/{CONFIG}"))
    found = [folder for folder in named if not _is_transformers(folder)]
    if not found:
        print(f"no runs in {options.folder}")
    for folder in found:
        try:
            print(line(folder))
        except (ValueError, OSError) as error:  # one that is broken hides no other
            print(f"{folder}  unreadable: {error}")
    if options.plot is not None:
        draw(found, options)
    return 0


def draw(folders: Sequence[Path], options: Options) -> None:
    """Write the picture of all runs that have a line of progress."""
    assert options.plot is not None
    names = [str(folder.relative_to(options.folder)) for folder in folders]
    names = [options.folder.name if name == "." else name for name in names]
    every = list(map(curves, folders, names))
    drawn = [each for each in every if each.train_loss]
    if not drawn:
        raise ValueError(f"plot must have a run with losses in its log, got {options.folder}")
    write_whole(options.plot, runs_figure(drawn, options.plot.suffix[1:]))
    print(f"written: {options.plot} ({len(drawn)} of {len(every)} runs)")


def curves(folder: Path, name: str) -> Curves:
    """The losses in a run's log, without pre-training; a line that is cut off is left out."""
    found = Curves(name, [], [])
    path = folder / LOG
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            if row["phase"] != "training":
                continue
            if "metrics" in row:
                found.valid_loss.append((int(row["step"]), float(row["metrics"]["loss"])))
            else:
                found.train_loss.append((int(row["step"]), float(row["loss"])))
        except (ValueError, TypeError, LookupError):  # cut off, or of something else
            continue
    return found


def _is_transformers(folder: Path) -> bool:
    """Whether a folder is a model of Transformers, whose config has the name of a run's."""
    with contextlib.suppress(ValueError, OSError):
        return "model_type" in read_json(folder / CONFIG)
    return False


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
