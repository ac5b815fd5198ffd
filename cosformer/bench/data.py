"""`cosformer bench data`: how fast ListOps and Pathfinder are generated."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosformer import records
from cosformer.bench.verb import check_counts, keep
from cosformer.tasks import generated


@dataclass(frozen=True)
class Options:
    """How fast data sets are generated, in samples a second. No sample is kept."""

    listops: int = 100_000
    """Samples of ListOps; as many as Long-Range Arena has."""
    listops_workers: int = 2
    """Processes that generate ListOps."""
    pathfinder: int = 2_000
    """Pictures of Pathfinder."""
    pathfinder_workers: int = 1
    """Processes that generate Pathfinder; 1 tells what a core does."""
    out: Path = Path("results/data-cpu.jsonl")
    """File the rows are added to."""
    seed: int = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        check_counts(self, "listops", "listops_workers", "pathfinder", "pathfinder_workers")


def run(options: Options) -> int:
    return keep(measure(options), options.out, keys=("set", "samples", "workers"), count=1)


def measure(options: Options) -> Iterator[records.Row]:
    """Seconds for each set, start of its processes included, and samples a second of a process."""
    this = records.Run.begin(seed=options.seed)
    wanted = {
        "listops": (options.listops, options.listops_workers),
        "pathfinder": (options.pathfinder, options.pathfinder_workers),
    }
    for name, (count, workers) in wanted.items():
        begin = time.perf_counter()
        generated.draw(name, count=count, seed=options.seed, workers=workers)
        seconds = time.perf_counter() - begin
        at = {"set": name, "samples": count, "workers": workers}
        yield this.row("generation_time", seconds, "s", **at)
        yield this.row("core_speed", count / seconds / workers, "samples/s", **at)
