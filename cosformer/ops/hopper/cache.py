"""The folder that keeps machine code from one process to the next, and what is loaded from it.

Whoever can write to a file of machine code decides what the process that loads it does. So code is
loaded only if its folder and its file belong to the current user and nobody else may write to them.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RULE = "must belong to the current user and be writable by nobody else"


def folder() -> Path:
    """`$XDG_CACHE_HOME/cosformer`, else `~/.cache/cosformer`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "cosformer")


def refusal(path: Path) -> str | None:
    """Why a file of the folder is not loaded, as a sentence that names the path; None if it is."""
    for each in (path.parent, path):
        found = each.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != _user() or mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{each} {RULE}, got user {found.st_uid} and mode {mode:04o}"
    return None


def read(path: Path) -> bytes | None:
    """What the file holds; None if there is no such file, or if it is refused."""
    try:
        return None if refusal(path) else path.read_bytes()
    except OSError:
        return None


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`; it takes the place of `path` once it has been written.

    Its name cannot be predicted, so that nobody can put a link there before. After an error,
    `path` is as it was. The folder is made for the current user alone.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid == _user():
        path.parent.chmod(0o700)  # an older one may be open to a group
    handle, name = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o600)  # a compiler may have replaced the file by one that others can write to
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _user() -> int:
    """The number of the current user; -1, which owns nothing, on systems without such numbers."""
    return os.getuid() if hasattr(os, "getuid") else -1
