"""Checkpoints in parts: every process writes what it has, and one file says where all of it lies.

The file `last.safetensors` then has a list in place of tensors: for each tensor its pieces, each of
which is in one of the files `last.parts/TOKEN/N.safetensors`. The list is written last and at once:
until it is there, the list before it holds, and the parts that this one names.
"""

import json
import math
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosformer.runtime import bytes_of
from cosformer.tasks import replacing

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    )
}
"""Types of numbers that a part may have, by name."""
TOKEN = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True)
class Piece:
    """Neighbouring numbers of a tensor, in the file of one process."""

    file: int
    """Number of the file."""
    offsets: tuple[int, ...]
    """Where the piece begins in the tensor, along each dimension."""
    shape: tuple[int, ...]
    checksum: str
    """CRC-32 of its bytes."""


@dataclass(frozen=True)
class Cut:
    """A tensor as its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for piece in self.pieces:
            ends = zip(self.shape, piece.offsets, piece.shape, strict=True)
            if any(not 0 <= at <= at + size <= whole for whole, at, size in ends):
                raise ValueError(f"a piece must lie in a tensor of {self.shape}, got {piece}")
        count = sum(math.prod(piece.shape) for piece in self.pieces)
        if count != math.prod(self.shape):
            raise ValueError(f"pieces must be the {math.prod(self.shape)} numbers, got {count}")


@dataclass(frozen=True)
class Listed:
    """All that a checkpoint in parts holds, as its file lists it."""

    token: str
    """Name of the folder of its parts."""
    tensors: dict[str, Cut]

    def __post_init__(self) -> None:
        if not TOKEN.fullmatch(self.token):  # it is a part of a path
            raise ValueError(f"token must be hexadecimal, got {self.token!r}")

    def written(self) -> Tensor:
        """As bytes: a list may be longer than what a file of safetensors may say of itself."""
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)


def listed(found: Tensor) -> Listed:
    """The list that `Listed.written` wrote; a ValueError for anything else."""
    try:
        given = json.loads(found.numpy().tobytes())
        tensors = {name: _cut(**cut) for name, cut in given["tensors"].items()}
        return Listed(given["token"], tensors)
    except (TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"its list must be one of pieces: {error}") from None


def _cut(dtype: str, shape: list[int], pieces: list[dict[str, Any]]) -> Cut:
    found = [
        Piece(each["file"], tuple(each["offsets"]), tuple(each["shape"]), each["checksum"])
        for each in pieces
    ]
    return Cut(dtype, tuple(shape), tuple(found))


class Parts(Mapping[str, Tensor]):
    """The tensors of a checkpoint in parts, each read when it is asked for."""

    def __init__(self, path: Path, listed: Listed) -> None:
        """`path`: the file that has the list."""
        self.path, self.listed = path, listed

    def __getitem__(self, name: str) -> Tensor:
        cut = self.listed.tensors[name]
        found = [(piece, self.read(name, piece)) for piece in cut.pieces]
        whole = torch.zeros(cut.shape, dtype=DTYPES[cut.dtype])  # as many numbers as were read
        for piece, tensor in found:
            ends = zip(piece.offsets, piece.shape, strict=True)
            whole[tuple(slice(at, at + size) for at, size in ends)] = tensor
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed.tensors)

    def __len__(self) -> int:
        return len(self.listed.tensors)

    def outline(self) -> dict[str, Tensor]:
        """Names, shapes and dtypes; nothing is read."""
        return {
            name: torch.empty(cut.shape, dtype=DTYPES[cut.dtype], device="meta")
            for name, cut in self.listed.tensors.items()
        }

    def read(self, name: str, piece: Piece) -> Tensor:
        """A piece, once it is found to be as it was written."""
        import safetensors

        path = file_of(self.path, self.listed.token, piece.file)
        if not path.is_file():
            raise ValueError(
                f"checkpoint {self.path} must have its parts, got none at {path}: they are "
                "replaced while a run is trained, and belong to the folder where it is copied"
            )
        try:
            with safetensors.safe_open(path, "pt") as file:
                found: Tensor = file.get_tensor(name)
        except (safetensors.SafetensorError, RuntimeError) as error:
            raise ValueError(f"{path} must be a part of a checkpoint: {error}") from None
        dtype = DTYPES[self.listed.tensors[name].dtype]
        is_same = (tuple(found.shape), found.dtype) == (piece.shape, dtype)
        if not is_same or checksum(found) != piece.checksum:
            raise ValueError(
                f"checkpoint must be as it was written, got {path}: {name} has changed"
            )
        return found


def checksum(*contents: bytes | memoryview | Tensor) -> str:
    """CRC-32 of bytes and of tensors on a CPU, by which a flipped bit is noticed."""
    total = 0
    for each in contents:
        if isinstance(each, Tensor):
            each = bytes_of(each).numpy().data
        total = zlib.crc32(each, total)
    return f"{total:08x}"


def put(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors on a CPU as a file of safetensors, at once; an error tells its size."""
    import safetensors.torch

    content = safetensors.torch.save(dict(tensors), dict(about))
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        kept = "the one before it is kept" if path.exists() else "there is none before it"
        message = f"{error.strerror}: checkpoint of {len(content):,} bytes not written, {kept}"
        raise OSError(error.errno, message, str(path)) from error


def save_pretrained(model: Any, folder: Path) -> None:
    """Transformers' `model.save_pretrained(folder)`, whose failure to write is an OSError here."""
    import safetensors

    try:
        model.save_pretrained(folder)
    except safetensors.SafetensorError as error:
        raise OSError(f"weights not written to {folder}: {error}") from error


def folder_of(path: Path) -> Path:
    """Where the parts of a checkpoint lie."""
    return path.with_suffix(".parts")


def file_of(path: Path, token: str, number: int) -> Path:
    return folder_of(path) / token / f"{number}.safetensors"


def sweep(path: Path, token: str | None) -> None:
    """Remove the parts of a checkpoint, but for those that its list names."""
    for each in folder_of(path).iterdir() if folder_of(path).is_dir() else ():
        if each.name != token:
            shutil.rmtree(each, ignore_errors=True)
    if token is None and folder_of(path).is_dir():
        folder_of(path).rmdir()
