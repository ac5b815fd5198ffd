"""Where data lies, how it is opened, and how a file is written: whole or not at all."""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from cosformer.tasks.ragged import Array

VARIABLE = "COSFORMER_DATA"
"""Environment variable that names the data folder."""
FETCHED = ("wikitext2", "tinyshakespeare", "enwik8", "imdb", "image")
"""Data sets that `cosformer data get` has a source for; files of others are the user's to bring."""
LIMIT = 2**33
"""Bytes that a packed file may unpack to: a few of them can be made to fill any memory."""
_ASKING = threading.Lock()
OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}


def folder(given: Path | str | None = None) -> Path:
    """The data folder: as given, else that of the environment, else one for caches."""
    if given is not None:
        return Path(given)
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosformer"


def require(path: Path, name: str) -> Path:
    """The path of a file of the data set `name`; an error that says what to do if it is missing."""
    if path.is_file():
        return path
    remedy = f"`cosformer data get {name}` fetches it"
    if name not in FETCHED:
        remedy = f"{name} has no source to fetch it from: put the file there yourself"
    missing = "" if path.parent.exists() else ", which does not exist"
    raise ValueError(f"data must hold the file {path.name}, got {path.parent}{missing}; {remedy}")


def read_bytes(path: Path) -> bytes:
    """Contents of a file, unpacked where its name says that it is packed."""
    opener = OPENERS.get(path.suffix)
    if opener is None:
        return path.read_bytes()
    with _unpacking(path), opener(path, "rb") as file:
        content: bytes = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise ValueError(f"{path} must unpack to at most {LIMIT:,} bytes: unpack it yourself")
    return content


def read_text(path: Path) -> str:
    """Contents of a file as text, unpacked where needed; line ends stay as they are."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8: {error}") from None


@contextlib.contextmanager
def reading(path: Path, newline: str) -> Iterator[IO[str]]:
    """A text to be read line by line, unpacked where needed: it may be larger than the memory."""
    opener = OPENERS.get(path.suffix, open)
    try:
        with _unpacking(path), opener(path, "rt", encoding="utf-8", newline=newline) as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8: {error}") from None


@contextlib.contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    """What packers raise in the block because a file is broken becomes an error that names it."""
    try:
        yield
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system
            raise
        raise ValueError(f"{path} must be a whole {path.suffix} file: {error}") from None


def plain_suffix(path: Path) -> str:
    """What kind of file it is: `.tsv` of `x.tsv.xz`."""
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once all is written and on disk; else nothing does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own: two writers do not meet, the last one wins with a whole file
    handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, 0o666 & ~_umask())
        os.replace(unfinished, path)
    except BaseException as error:
        Path(unfinished).unlink(missing_ok=True)  # replaced, if the interrupt came right after
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error  # as of a full disk
        raise
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Return when the names of the files in a folder are on disk as well."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_arrays(path: Path, **arrays: Array) -> None:
    """Arrays by name in one `.npz`, written whole."""
    with replacing(path) as file:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        file.write(buffer.getbuffer())


def load_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an `.npz`; its checksums are verified, and nothing in it is executed."""
    try:
        # opened here: numpy leaves a broken file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            size = sum(member.file_size for member in found.zip.infolist())
            if size > LIMIT:
                raise ValueError(f"it must unpack to at most {LIMIT:,} bytes, got {size:,}")
            return {name: found[name] for name in found.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen kinds for a broken file
        raise ValueError(f"{path} must be a whole .npz of plain arrays: {error}") from None


def _umask() -> int:
    with _ASKING:  # of two threads that ask at once one would be told 0, and leave it so
        mask = os.umask(0)
        os.umask(mask)
    return mask
