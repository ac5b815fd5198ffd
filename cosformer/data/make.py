"""`cosformer data make NAME …`: generate data sets once, by all cores."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cosformer.check import check_new_folder
from cosformer.tasks import files, generated

POSITIONAL = "names"
WORDS = {"names": generated.MADE}


@dataclass(frozen=True)
class Options:
    """Generate data sets; the same seed gives the same samples on any number of cores.

    cosformer data make listops --count 10000
    """

    names: tuple[str, ...] = tuple(generated.MADE)
    """Which ones: listops, pathfinder, snakes."""
    count: int | None = None
    """Samples in all; as many as their tasks take if not given."""
    seed: int = 0
    """Seed of the samples."""
    workers: int = os.cpu_count() or 1
    """Processes."""
    data: Path | None = None
    """Folder for the files; COSFORMER_DATA, else one in the user's cache, if not given."""

    def __post_init__(self) -> None:
        for name in self.names:
            generated.require_known(name)


def run(options: Options) -> int:
    where = check_new_folder("data", files.folder(options.data))
    for name in options.names:
        count = generated.MADE[name].count if options.count is None else options.count
        path = generated.path_of(name, where, count=count, seed=options.seed)
        if path.exists():
            print(f"{name}: {path} already there")
            continue
        began = time.perf_counter()
        generated.make(
            name,
            where,
            count=count,
            seed=options.seed,
            workers=options.workers,
            progress=_show,
        )
        seconds = time.perf_counter() - began
        rate = f"{count / seconds:,.0f} a second by {options.workers} processes"
        print(f"{name}: {count:,} samples in {seconds:.1f} s, {rate}: {path}")
    return 0


def _show(have: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r  {have:,} of {total:,}", end="\n" if have == total else "", file=sys.stderr)
