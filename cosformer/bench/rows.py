"""What every measuring verb does with its rows: write each to a file at once, and print it."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cosformer import records
from cosformer.bench.timing import busy, threads
from cosformer.host_memory import keep_freed_memory


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
