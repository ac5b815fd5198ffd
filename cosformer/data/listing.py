"""`cosformer data list`: the data sets, and which of them are there."""

from dataclasses import dataclass
from pathlib import Path

from cosformer.data.known import SETS, SOURCES
from cosformer.tasks import FROM_PYTHON, files, generated


@dataclass(frozen=True)
class Options:
    """The data sets that tasks know, whether they are there, and how to get them.

    cosformer data list --data my-folder
    """

    data: Path | None = None
    """Folder with the files; COSFORMER_DATA, else one in the user's cache, if not given."""


def run(options: Options) -> int:
    where = files.folder(options.data)
    print(f"data folder: {where}{'' if where.is_dir() else ' (not there yet)'}\n")
    for name, state, line in rows(where):
        print(f"  {name:<16} {state:<10} {line}")
    print("\nget: cosformer data get NAME; make: cosformer data make NAME; file: bring your own.")
    return 0


def rows(where: Path) -> list[tuple[str, str, str]]:
    """Name, state and one line of every set."""
    found = [(name, "built in", line) for name, line in FROM_PYTHON.items()]
    for name, made in generated.MADE.items():
        there = any(where.glob(f"{name}-*-seed*.npz"))
        found.append((name, "there" if there else "make", made.summary))
    for name, (names, line) in SETS.items():
        there = all((where / each).is_file() for each in names)
        found.append((name, "there" if there else "get" if name in SOURCES else "file", line))
    return found
