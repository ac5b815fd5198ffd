"""Generated data sets: drawn once in numbered blocks by several processes, kept on disk."""

import hashlib
import itertools
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosformer.tasks import files, listops, pathfinder, snakes
from cosformer.tasks.ragged import Array, Ragged

BLOCK = 500
"""Samples of one block; a block depends on the seed and its number alone, not on who draws it.

A smaller set is one block of its own size, so that it has samples of every kind as well.
"""
Progress = Callable[[int, int], None]
"""Called with the number of samples that are ready and the number wanted."""


@dataclass(frozen=True)
class Made:
    """A data set that is generated: how, how much by default, and how a sample is checked."""

    block: Callable[[np.random.Generator, int], Ragged]
    rule: object
    count: int
    summary: str


MADE = {
    "listops": Made(
        listops.draw, listops.ListOpsRule(), 100_000, "nested operators on digits, 10 classes"
    ),
    "pathfinder": Made(
        lambda rng, count: Ragged.of_rows(*pathfinder.draw(rng, count)),
        pathfinder.PathfinderRule(),
        200_000,
        "is the dashed path one, 32 × 32",
    ),
    "snakes": Made(
        lambda rng, count: Ragged.of_rows(*snakes.draw_snakes(rng, count)),
        pathfinder.PathfinderRule(),
        160_000,
        "Pathfinder with shorter snakes, 1 to 13 dashes",
    ),
}
"""Name -> what can be generated."""


def path_of(name: str, data: Path | str | None, *, count: int, seed: int) -> Path:
    """Where a generated set is kept."""
    require_known(name)
    return files.folder(data) / f"{name}-{count}-seed{seed}.npz"


def make(
    name: str,
    data: Path | str | None = None,
    *,
    count: int | None = None,
    seed: int = 0,
    workers: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Generate a set unless it is there already; the file it lies in."""
    require_known(name)
    count = MADE[name].count if count is None else count
    for argument, value, least in (("count", count, 1), ("seed", seed, 0), ("workers", workers, 1)):
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")
    path = path_of(name, data, count=count, seed=seed)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)  # no work whose result cannot be kept
        drawn = draw(name, count=count, seed=seed, workers=workers, progress=progress)
        files.save_arrays(
            path,
            flat=drawn.flat,
            starts=drawn.starts,
            labels=drawn.labels.astype(np.uint8),
            about=np.array(json.dumps(_about(name, count=count, seed=seed))),
        )
    return path


def draw(
    name: str, *, count: int, seed: int, workers: int = 1, progress: Progress | None = None
) -> Ragged:
    """`count` different samples, the same whatever the number of workers."""
    parts, have, seen = list[Ragged](), 0, set[bytes]()
    size = _block(count)
    blocks = _blocks(name, -(-count // size), size, seed=seed, workers=workers)
    try:
        while have < count:
            part = next(blocks)
            new = [n for n in range(len(part)) if not _known(part[n], seen)][: count - have]
            parts.append(part.take(np.array(new, np.int64)))
            have += len(new)
            if progress is not None:
                progress(have, count)
    finally:
        blocks.close()
    return Ragged.join(parts)


def load(path: Path) -> Ragged:
    """A set that `make` wrote by the rule of today, its parts found to fit together."""
    arrays = files.load_arrays(path)
    if missing := {"flat", "starts", "labels", "about"} - arrays.keys():
        raise ValueError(f"{path} must hold what `cosformer data make` writes, got no {missing}")
    about = _told(arrays)
    if about.get("rule") not in [_rule(name) for name in MADE if name == about.get("name")]:
        raise ValueError(
            f"{path} must be of the rule of today, got {about}: without it, it is made anew"
        )
    found = Ragged(arrays["flat"], arrays["starts"], arrays["labels"].astype(np.int64))
    edges = (found.starts[0], found.starts[-1])
    if edges != (0, len(found.flat)) or (found.lengths < 1).any():
        raise ValueError(f"{path} must have samples from 0 to {len(found.flat)}, got {edges}")
    return found


def verify(name: str, path: Path) -> Ragged:
    """The set, after its first block was drawn anew and, for ListOps, 200 values computed anew."""
    found, about = load(path), _told(files.load_arrays(path))
    if about != _about(name, count=len(found), seed=about.get("seed")):
        raise ValueError(f"{path} must be of the rule of today, got {about}")
    again = draw(name, count=min(len(found), BLOCK), seed=about["seed"])
    first = found.take(np.arange(len(again)))
    if not (np.array_equal(first.flat, again.flat) and np.array_equal(first.labels, again.labels)):
        raise ValueError(f"{path} must begin as seed {about['seed']} does, got other samples")
    if name == "listops":
        for n in np.linspace(0, len(found) - 1, min(len(found), 200)).astype(int).tolist():
            if listops.evaluate(found[n]) != found.labels[n]:
                raise ValueError(f"{path} must have right labels, got a wrong one at {n}")
    return found


def require_known(name: str) -> None:
    if name not in MADE:
        raise ValueError(f"name must be one of {', '.join(MADE)}, got {name!r}")


def _told(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """What a file says of itself."""
    try:
        about = json.loads(str(arrays["about"]))
    except ValueError:  # whatever it is, it is not what `make` writes
        return {}
    return about if isinstance(about, dict) else {}


def _about(name: str, *, count: int, seed: int | None) -> dict[str, object]:
    return {"name": name, "count": count, "seed": seed, "block": _block(count), "rule": _rule(name)}


def _block(count: int) -> int:
    """Samples that are drawn together; a small set is one block."""
    return max(1, min(count, BLOCK))


def _rule(name: str) -> dict[str, Any]:
    return asdict(MADE[name].rule)  # type: ignore[call-overload]


def _known(sample: Array, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(sample.tobytes(), digest_size=16).digest()
    is_known = digest in seen
    seen.add(digest)
    return is_known


def _blocks(
    name: str, expected: int, size: int, *, seed: int, workers: int
) -> Generator[Ragged, None, None]:
    """Blocks 0, 1, … in order; no more than `expected` are drawn before they are asked for."""
    if workers == 1:
        for number in itertools.count():
            yield _draw_block(name, seed, number, size)
    # fresh processes: a fork of one with threads of torch can hang
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread) as pool:
        ahead = deque[Future[Ragged]]()
        number = 0
        try:
            while True:
                while not ahead or (len(ahead) < 2 * workers and number < expected):
                    ahead.append(pool.submit(_draw_block, name, seed, number, size))
                    number += 1
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _draw_block(name: str, seed: int, number: int, size: int) -> Ragged:
    return MADE[name].block(np.random.default_rng([seed, number]), size)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
