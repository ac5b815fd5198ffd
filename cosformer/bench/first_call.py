"""The first call of a new process: how long loading and compiling keep its result waiting."""

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import torch

from cosformer.bench.candidates import CANDIDATES, forward_backward
from cosformer.bench.cells import CELLS, Setup
from cosformer.bench.gpu import failed
from cosformer.bench.timing import attempt, synchronise
from cosformer.records import Row, Run

CALLS = (
    ("auto", "8x16x1024x64"),
    ("auto", "8x16x1024x64-grouped"),
    ("decay", "8x16x1024x64"),
    ("gates", "8x16x1024x64"),
)
"""The candidate and the cell of each call whose first time is measured."""
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
"""The environment variables that say where compiled kernels are kept."""
LONGEST = 300
"""Seconds after which a process is given up."""


def measure_first_calls(
    this: Run, setup: Setup, calls: Sequence[tuple[str, str]] = CALLS
) -> Iterator[Row]:
    """Seconds of a first forward and backward pass: with an empty cache, then with a full one."""
    for candidate, cell in calls:
        at = setup.config(CELLS[cell], causal=True) | {"length": CELLS[cell].length}
        at |= {"pass": "forward_backward", "repeats": 1}
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "full"):
                wait = functools.partial(in_new_process, candidate, cell, setup, folder)
                seconds, reason = attempt(wait, setup.device)
                if seconds is None:
                    yield failed(this, candidate, reason, {**at, "cache": cache})
                    break
                yield this.row("first_call", seconds, "s", candidate=candidate, cache=cache, **at)


def in_new_process(candidate: str, cell: str, setup: Setup, folder: str) -> float:
    """Seconds of a first call in a process whose caches of compiled kernels lie in the folder."""
    caches = {name: os.path.join(folder, name) for name in CACHES}
    ended = subprocess.run(
        [sys.executable, "-m", __name__, candidate, cell, setup.dtype_name, setup.device],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["no message"])[-1])
    return float(ended.stdout.split()[-1])


def main(argv: Sequence[str]) -> int:
    """Print the seconds of one first call. `argv`: candidate, cell, dtype, device."""
    candidate, cell, dtype, device = argv
    setup = Setup(device, getattr(torch, dtype), repeats=1, seed=0)
    call = forward_backward(CANDIDATES[candidate], setup.inputs(CELLS[cell]))
    _start_autograd(device)
    synchronise(device)  # drawing the inputs has started CUDA, which is not ours to count
    begin = time.perf_counter()
    call()
    synchronise(device)
    print(time.perf_counter() - begin)
    return 0


def _start_autograd(device: str) -> None:
    """Have torch import what its first backward pass imports: sympy, which takes seconds."""
    x = torch.ones(2, device=device, requires_grad=True)
    torch.autograd.grad(x + x, x, torch.ones(2, device=device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
