"""`cosformer data check`: is what lies in the data folder whole, and what it should be?"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cosformer.check import check_folder
from cosformer.data.known import CONTENTS, SETS
from cosformer.tasks import arena, files, generated


@dataclass(frozen=True)
class Options:
    """Verify every known file in the data folder: checksums and counts.

    cosformer data check --data my-folder
    """

    data: Path | None = None
    """Folder with the files; COSFORMER_DATA, else one in the user's cache, if not given."""


def run(options: Options) -> int:
    """One line a file; 1 if one is not what it should be."""
    where = check_folder("data", files.folder(options.data))
    names = dict.fromkeys(file for known, _ in SETS.values() for file in known)
    present = [where / name for name in names if (where / name).is_file()]
    present += sorted(p for made in generated.MADE for p in where.glob(f"{made}-*-seed*.npz"))
    failures = 0
    for path in present:
        try:
            print(f"ok      {path.name:<28} {check(path)}", flush=True)
        except ValueError as error:
            failures += 1
            print(f"BROKEN  {path.name:<28} {error}", flush=True)
    print(f"{len(present)} files in {where}, {failures} broken")
    return 1 if failures else 0


def check(path: Path) -> str:
    """What was found in a file; an error if it should have been something else."""
    if path.name == arena.PICTURES:
        return _check_pictures(path)
    if path.name not in CONTENTS:
        found = generated.verify(path.name.split("-")[0], path)
        lengths = found.lengths
        return (
            f"{len(found):,} samples of {lengths.min()} to {lengths.max()} tokens, "
            f"most frequent label {np.bincount(found.labels).max() / len(found):.1%}"
        )
    content, known = files.read_bytes(path), CONTENTS[path.name]
    if (lines := content.count(b"\n")) != known.lines:
        raise ValueError(f"{path.name} must have {known.lines:,} lines, got {lines:,}")
    if (found_sha := hashlib.sha256(content).hexdigest()) != known.sha256:
        raise ValueError(f"{path.name} must hold sha256 {known.sha256}, got {found_sha}")
    return f"{lines:,} lines, {len(content):,} bytes"


def _check_pictures(path: Path) -> str:
    """Shapes and balance: grey levels depend on rounding, so that no checksum is the right one."""
    arrays = files.load_arrays(path)
    for split, each in (("train", 5000), ("test", 1000)):
        labels = arrays.get(f"y_{split}", np.zeros(0, np.int64))
        if (counts := np.bincount(labels, minlength=10)).tolist() != [each] * 10:
            raise ValueError(f"{path.name} must have {each} of each class to {split}, got {counts}")
        shape = arrays.get(f"x_{split}", labels).shape
        if shape != (10 * each, 32, 32):
            raise ValueError(f"{path.name} must have 32 × 32 pictures to {split}, got {shape}")
    return "50,000 + 10,000 pictures, 10 classes in balance"
