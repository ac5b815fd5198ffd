"""A measurement is a row before it is a table or a picture: a line of JSON that says whence."""

import dataclasses
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cosformer import __version__
from cosformer.check import check_choice, check_mapping, check_new_file
from cosformer.host_memory import keeps_freed_memory

BEGINNING = b'{"what"'
"""How the line of every row begins: what a killed writer left of one is known by it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured number and all that is needed to judge it."""

    what: str
    """The quantity, as `time` or `growth_exponent`."""
    config: Mapping[str, Any]
    """What was measured: shapes, types, candidate. JSON values only."""
    value: float
    unit: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None
    seed: int | None
    date: str
    """When the run began (UTC, ISO 8601). Rows of one run share it, so it also names the run."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value of a row must be finite, got {self.value} for {self.what!r}")


@dataclasses.dataclass(frozen=True)
class Run:
    """What all rows of one run have in common."""

    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None
    seed: int | None
    date: str

    @classmethod
    def begin(cls, *, device: str = "cpu", seed: int | None = None) -> "Run":
        """Describe this machine and this code, now."""
        date = datetime.now(UTC).isoformat(timespec="microseconds")
        return cls(describe_hardware(device), versions(), commit(), seed, date)

    def row(self, what: str, value: float, unit: str, **config: Any) -> Row:
        """A row of this run."""
        return Row(what, config, value, unit, **vars(self))


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a JSONL file as whole lines; they are on disk when this returns."""
    import fcntl

    lines = "".join(
        json.dumps(dataclasses.asdict(row), allow_nan=False, ensure_ascii=False) + "\n"
        for row in rows
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # what another process is writing would look cut off
        _end_last_line(path)
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Row]:
    """The rows of a JSONL file. A last line that a killed writer cut off is skipped, warned of."""
    *lines, last = path.read_bytes().split(b"\n")
    if _is_cut_off(last):
        warnings.warn(f"{path}: line {len(lines) + 1} is unfinished and is skipped", stacklevel=2)
    else:
        lines.append(last)
    return [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def require_rows(path: Path, name: str) -> None:
    """Raise unless rows can be added to the file `name` gives: asked before they are measured."""
    if not check_new_file(name, path).exists():
        return
    with warnings.catch_warnings(action="ignore"):  # of a last line cut off, which `append` mends
        try:
            read(path)
        except ValueError as error:
            raise ValueError(f"{name} must be a new file or one of rows, but {error}") from None


def describe_hardware(device: str = "cpu") -> dict[str, Any]:
    """The device in terms that matter for speed; nothing that names the machine or its user."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": "cuda",
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30),
        }
    return {
        "device": "cpu",
        "name": _processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "keeps_freed_memory": keeps_freed_memory(),
    }


def versions() -> dict[str, str]:
    """Versions of what a measurement depends on; packages that are not installed are left out."""
    found = {"cosformer": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "flash-linear-attention"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


@functools.cache
def commit(package: Path = Path(__file__).parent) -> str | None:
    """The commit of the package, `-dirty` where its code differs; None outside a checkout."""
    try:
        # a package installed inside somebody else's repository is not tracked there
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        head = _git(package, "rev-parse", "--short=12", "HEAD")
        changed = _git(package, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def growth_exponent(values: Mapping[int, float]) -> float:
    """The p of `value ~ size^p`: least squares in log-log. 1 is linear, 2 quadratic."""
    if len(values) < 2:
        raise ValueError(f"values must hold at least two sizes, got {sorted(values)}")
    sizes = [math.log(size) for size in values]
    return statistics.linear_regression(sizes, [math.log(v) for v in values.values()]).slope


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _parse(line: bytes, place: str) -> Row:
    try:
        given, names = json.loads(line), [field.name for field in dataclasses.fields(Row)]
        check_mapping("it", given)
        for key in given:
            check_choice("key", key, names)
        if missing := [name for name in names if name not in given]:
            raise ValueError(f"key {missing[0]!r} must be there, got {', '.join(given) or 'none'}")
        return Row(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} is not a row: {error}") from None


def _is_cut_off(line: bytes) -> bool:
    """Whether the line is the beginning of a row, and not all of it."""
    if not line or not (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _end_last_line(path: Path) -> None:
    """See to it that the next row is not glued to a line without end.

    What a killed writer left of a row is removed; a whole row is ended; all else is the user's.
    """
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    last = content[whole:]
    if _is_cut_off(last):
        warnings.warn(f"{path}: an unfinished last line is removed", stacklevel=3)
        os.truncate(path, whole)
    elif last:
        _parse(last, f"{path}, last line")
        with path.open("ab") as file:
            file.write(b"\n")


def _processor_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
