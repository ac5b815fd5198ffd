"""Memory of tensors on a CPU: kept by the process, or cleared anew page by page by Linux."""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # names of glibc's mallopt
NEVER = -1

_kept = False


def keep_freed_memory() -> bool:
    """Have glibc keep what tensors leave for the next ones, until the process ends.

    By itself it gives large blocks back at once. In the main thread alone; where sizes change
    all the time, little blocks between large ones may multiply the memory of a process.
    Benchmarks call this. An environment with `MALLOC_…` or `GLIBC_TUNABLES` is left as it is.

    Returns:
        Whether it does: not without glibc.
    """
    global _kept
    if _kept or _environment_decides() or sys.platform != "linux":
        return _kept
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    _kept = mallopt is not None and bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, NEVER))
    return _kept


def keeps_freed_memory() -> bool | None:
    """Whether `keep_freed_memory` has done so; None where that is the environment's matter."""
    return None if _environment_decides() else _kept


def _environment_decides() -> bool:
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
