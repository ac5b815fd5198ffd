"""From published files to those that tasks read. What is read is data, never code."""

import io
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from cosformer.tasks import Array

LIMIT = 2**30
"""Bytes that an archive may unpack to: three times as many as the largest one has."""
PIXELS = 32 * 32
GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue."""


def as_it_is(path: Path, name: str) -> bytes:
    """The download itself."""
    return path.read_bytes()


def member_of_zip(path: Path, name: str) -> bytes:
    """The file in a zip whose name is that of the wanted one without its ending."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(Path(name).stem) as file:
            content = file.read(LIMIT + 1)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path.name} must be a zip with {Path(name).stem}: {error}") from None
    _require_size(path, len(content))
    return content


def reviews(path: Path, name: str) -> bytes:
    """aclImdb's reviews of one split as a table: positive ones first, by number."""
    split = "train" if "train" in name else "test"
    rows = []
    for place, content in _members(path).items():
        parts = place.split("/")
        if len(parts) == 4 and parts[1] == split and parts[2] in ("pos", "neg"):
            named = re.fullmatch(r"(\d+)_(\d+)\.txt", parts[3])
            if named is None:
                raise ValueError(f"{path.name} must have reviews as 12_7.txt, got {place!r}")
            try:
                text = content.decode().replace("\t", " ")
            except UnicodeDecodeError as error:
                raise ValueError(f"{place!r} in {path.name} must be UTF-8: {error}") from None
            rows.append((parts[2] == "neg", int(named[1]), named[2], text))
    lines = ["label\trating\tid\ttext"]
    lines += [
        f"{1 - neg}\t{rating}\t{number}\t{text}" for neg, number, rating, text in sorted(rows)
    ]
    return ("\n".join(lines) + "\n").encode()


def grey_pictures(path: Path, name: str) -> bytes:
    """CIFAR-10's binary version as arrays of grey pixels, in the published order."""
    batches = {Path(place).name: content for place, content in _members(path).items()}
    wanted = {"train": [f"data_batch_{n}.bin" for n in range(1, 6)], "test": ["test_batch.bin"]}
    arrays: dict[str, Array] = {}
    for split, parts in wanted.items():
        if missing := [part for part in parts if part not in batches]:
            raise ValueError(f"{path.name} must hold {missing[0]}, got {', '.join(batches)}")
        for part in parts:
            if len(batches[part]) % (1 + 3 * PIXELS):
                rule = f"must have {1 + 3 * PIXELS} bytes for each picture"
                raise ValueError(f"{part} in {path.name} {rule}, got {len(batches[part])}")
        raw = np.frombuffer(b"".join(batches[part] for part in parts), np.uint8)
        records = raw.reshape(-1, 1 + 3 * PIXELS)
        colours = records[:, 1:].reshape(-1, 3, 32, 32)
        grey = sum(weight * colours[:, n] for n, weight in enumerate(GREY))
        arrays[f"x_{split}"] = np.rint(grey).astype(np.uint8)
        arrays[f"y_{split}"] = records[:, 0].copy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _members(path: Path) -> dict[str, bytes]:
    """Plain files of a tar by name. They are read, not unpacked to disk."""
    found, size = {}, 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                size += member.size
                _require_size(path, size)
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    found[member.name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path.name} must be a whole tar: {error}") from None
    return found


def _require_size(path: Path, size: int) -> None:
    if size > LIMIT:
        raise ValueError(f"{path.name} must unpack to at most {LIMIT:,} bytes, got {size:,}")
