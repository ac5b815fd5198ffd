"""Processes that know each other, on this machine: one group of them runs many checks."""

import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cosformer.distributed import exchange

Check = Callable[[], None]


def failures(checks: Mapping[str, Check], ranks: int) -> dict[str, str]:
    """The name of every check that fails on some rank -> what it says there.

    Checks are functions of a module, or partials of them: a new process imports them by name.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (ranks, folder, checks), nprocs=ranks)
        found: dict[str, str] = {}
        for rank in range(ranks):
            for name, said in torch.load(Path(folder) / str(rank)).items():
                found[name] = f"{found.get(name, '')}\nrank {rank}:\n{said}"
        return found


def alternating(checks: Mapping[str, Check], ranks: int) -> dict[str, Check]:
    """The checks, of which every other one has states handed on; with 3 and 4 ranks each has."""
    if ranks == 2:
        return dict(checks)
    return {
        name: partial(handed_on, check) if n % 2 == ranks % 2 else check
        for n, (name, check) in enumerate(checks.items())
    }


def handed_on(check: Check) -> None:
    """A check by which few ranks hand states on, as many do."""
    few, exchange.MANY = exchange.MANY, 2
    try:
        check()
    finally:
        exchange.MANY = few


def _work(rank: int, ranks: int, folder: str, checks: Mapping[str, Check]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    found = {}
    for name, check in checks.items():
        try:
            check()
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    torch.save(found, Path(folder) / str(rank))
    dist.destroy_process_group()
