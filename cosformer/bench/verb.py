"""What measuring verbs share: options, their checks, and rows that are kept as they come."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from cosformer import records
from cosformer.bench.timing import busy, threads
from cosformer.check import check_seed, check_whole
from cosformer.host_memory import keep_freed_memory


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Options of a verb that measures on a device. Its rows go to results/NAME-DEVICE.jsonl."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Device -> option -> what stands for it there where it is not given."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    threads: int = 2
    """CPU threads of torch."""
    out: Path | None = None
    """File the rows are added to. If not given, one in results/ by the names of verb and device, as
    ops-cpu.jsonl."""

    @property
    def path(self) -> Path:
        return self.out or Path(f"results/{self.name}-{self.device}.jsonl")

    def given(self, option: str) -> Any:
        """The option, or what stands for it on this device."""
        value = getattr(self, option, None)
        return self.defaults[self.device].get(option) if value is None else value

    def keep(self, rows: Iterable[records.Row], keys: Sequence[str]) -> int:
        """`keep` where and how these options say."""
        return keep(rows, self.path, keys=keys, count=self.threads, device=self.device)


def check_options(options: Any, *counts: str) -> None:
    """Refuse a bad seed, a device that is not there, and options of counts that are below 1."""
    check_seed(options.seed)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be one that torch can use here, got cuda")
    check_counts(options, "threads", "repeats", *counts)


def check_counts(options: Any, *names: str) -> None:
    """Refuse options that are not whole numbers from 1 on, or not one or more of them."""
    for name in names:
        value = getattr(options, name)
        if value == ():
            raise ValueError(f"{name} must be one or more whole numbers, got none")
        for count in value if isinstance(value, tuple) else (value,):
            if count is not None:
                check_whole(name, count, 1)


def check_among(name: str, values: Collection[str], known: Collection[str]) -> None:
    """Refuse an option that names none, or one that is not known."""
    if not values or not set(values) <= set(known):
        raise ValueError(f"{name} must be among {', '.join(known)}, got {list(values)}")


def keep(
    rows: Iterable[records.Row],
    path: Path,
    *,
    keys: Sequence[str],
    count: int,
    device: str = "cpu",
    option: str = "out",
) -> int:
    """Measure with so many threads: rows to the file as they come; the exit code of a verb.

    `keys` are what a line shows of a row's config. The path is what the verb's `option` gives.
    """
    records.require_rows(path, option)
    if warning := busy(count if device == "cpu" else 1):
        print(warning, file=sys.stderr)
    keep_freed_memory()  # fresh pages of long tensors would bend their growth
    with threads(count):
        for row in rows:
            records.append(path, [row])
            print(line(row, keys), flush=True)
    print(f"rows added to {path}")
    return 0


def line(row: records.Row, keys: Sequence[str]) -> str:
    place = " ".join(str(row.config[key]) for key in keys if key in row.config)
    return f"{row.what:<22} {place:<46} {row.value:>12.4g} {row.unit}"
