"""Processes as torchrun starts them, on this machine, but forked from one that has imported all."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

LONGEST, PATIENCE = 60, 3
"""Seconds for all ranks, and for the others once one has failed."""
PROCESSES = multiprocessing.get_context("forkserver")
# imported once for all processes, with what an optimiser, a mesh and FSDP import on first use
PROCESSES.set_forkserver_preload(
    [
        "cosformer.commands.train",
        "torch._dynamo",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "safetensors.torch",
    ]
)


def ended(count: int, target: Callable[..., int | None], *arguments, said: Path) -> list[int]:
    """Exit codes of so many ranks; what rank n says on stderr is in the file n of the folder.

    As with torchrun, the store outlives every rank, and ranks are killed when one has failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said.mkdir(exist_ok=True)
    ranks = [
        PROCESSES.Process(target=_rank, args=(rank, count, store.port, said, target, arguments))
        for rank in range(count)
    ]
    for each in ranks:
        each.start()
    end = time.monotonic() + LONGEST
    while any(each.exitcode is None for each in ranks) and time.monotonic() < end:
        time.sleep(0.02)
        if any(each.exitcode for each in ranks):
            end = min(end, time.monotonic() + PATIENCE)
    for each in ranks:
        each.kill()
        each.join()
    return [each.exitcode for each in ranks]


def _rank(rank, count, port, said, target, arguments):
    address = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    address |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    address |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in address.items()})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    with (said / str(rank)).open("w") as file, contextlib.redirect_stderr(file):
        sys.exit(target(*arguments))
