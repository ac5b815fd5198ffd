"""Memory of tensors on a CPU: kept by the process, or cleared anew page by page by Linux."""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # names of glibc's mallopt
MOST = 2**31 - 1

_kept = False


def keep_freed_memory() -> bool:
    """Have glibc keep what tensors leave for the next ones, until the process ends.

    By itself it gives large blocks back at once. `cosformer` on the command line calls this;
    variables `MALLOC_…` or `GLIBC_TUNABLES` of the environment are left as they are.

    Returns:
        Whether it does: not without glibc.
    """
    global _kept
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if _kept or chosen or sys.platform != "linux":
        return _kept
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    _kept = mallopt is not None and bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, MOST))
    return _kept


def keeps_freed_memory() -> bool:
    """Whether `keep_freed_memory` has done so."""
    return _kept
