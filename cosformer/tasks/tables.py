"""Labelled texts from TSV, CSV and JSONL files, packed or not."""

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cosformer.tasks import files
from cosformer.tasks.ragged import Array

SPLIT_NAMES = {"train": "train", "dev": "valid", "validation": "valid"}
SPLIT_NAMES |= {"valid": "valid", "val": "valid", "test": "test"}
TEXT_COLUMNS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
    ("text",),
)
"""Columns that are looked for, in this order, where none are named."""
TRAINING = "--set task.options.{}=COLUMN"
"""How a column is named where a task is learnt."""

MARK = "\ufeff"
"""What some spreadsheets put before the first letter of a file."""


Cell = str | None
"""What a row has in a column; None: JSON has null there, or nothing."""


class Names(NamedTuple):
    """What a table calls its classes, and the columns of its texts."""

    labels: tuple[str, ...]
    """The classes 0, 1, … in the user's words."""
    columns: tuple[str, ...]
    """One column, or two of pairs; none: such columns are looked for."""


@dataclass(frozen=True)
class TableSet:
    """A data set known by name."""

    files: Mapping[str, str]
    """Split -> file; "" for a file with a column `split`."""
    summary: str
    label: str = "label"
    text: tuple[str, ...] = ()


def _one(name: str) -> Mapping[str, str]:
    return {"": f"{name}.tsv.xz"}


KNOWN = {
    "sst2": TableSet(_one("sst2"), "SST-2: is a sentence of a film review positive"),
    "cola": TableSet(_one("cola"), "CoLA: is a sentence acceptable English"),
    "mrpc": TableSet(_one("mrpc"), "MRPC: do two sentences mean the same"),
    "rte": TableSet(_one("rte"), "RTE: does one sentence follow from another"),
    "mnli": TableSet(_one("mnli_20k"), "MNLI, a subset: entailed, neutral or contradicted"),
    "snli": TableSet(_one("snli_100k"), "SNLI, a subset: entailed, neutral or contradicted"),
    "qqp": TableSet(_one("qqp_10k"), "QQP, a subset: are two questions the same"),
    "imdb": TableSet(
        {"train": "imdb_train.tsv.xz", "test": "imdb_test.tsv.xz"},
        "IMDB: is a film review positive",
        text=("text",),
    ),
    "amazon": TableSet(_one("amazon_stars_13k"), "Amazon, a subset: 1 to 5 stars", label="stars"),
}


@dataclass(frozen=True)
class Table:
    """Labelled texts: a column of texts for each part of a sample."""

    texts: tuple[list[str], ...]
    labels: Array
    classes: list[str]
    """What the labels 0, 1, … are called in the file."""
    columns: tuple[str, ...]
    """What the columns of texts are called in the file."""
    splits: dict[str, Array] = field(default_factory=dict)
    """Split -> numbers of its samples, where the file says so."""


def read(paths: Mapping[str, Path], *, text: Sequence[str] = (), label: str = "label") -> Table:
    """All samples of a set; keys are splits, or "" where a column `split` may tell."""
    columns: dict[str, list[str]] = {}
    splits: list[str] = []
    for split, path in paths.items():
        found = _columns(path)
        count = len(next(iter(found.values())))
        names = tuple(text) or _guess(found, path, TRAINING)
        if len({*names, label}) <= len(names):
            given = ", ".join(map(repr, (*names, label)))
            raise ValueError(f"text and label must be different columns, got {given} for {path}")
        for name in (*names, label):
            _require(name, found, path, TRAINING.format("label" if name == label else "text"))
            columns.setdefault(name, []).extend(_told(found[name], name, path))
        own = _told(found.get("split", [""] * count), "split", path)
        splits += [split] * count if split else own
    labels, classes = _classes(columns[label])
    texts = tuple(columns[name] for name in names)
    return Table(texts, labels, classes, names, _by_split(splits))


def stream(path: Path, text: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """The texts of a table row by row: it may be larger than the memory, and needs no labels.

    `text` names one column or two; none: they are looked for.
    """
    remedy = "--text COLUMN"
    with files.reading(path, "" if files.plain_suffix(path) == ".csv" else "\n") as file:
        rows = _rows(path, file)
        header = list(map(str, next(rows)))  # an error where there is none
        names = tuple(text) or _guess(header, path, remedy)
        for name in names:
            _require(name, header, path, remedy)
        at = [header.index(name) for name in names]
        for first, cells in enumerate(rows, 1):
            yield tuple(_told([cells[n]], header[n], path, first)[0] for n in at)


def _columns(path: Path) -> dict[str, list[Cell]]:
    """Columns by name, all as text."""
    newline = "" if files.plain_suffix(path) == ".csv" else "\n"
    header, *lines = _rows(path, io.StringIO(files.read_text(path), newline=newline))
    return {str(name): [cells[n] for cells in lines] for n, name in enumerate(header)}


def _told(cells: Sequence[Cell], name: str, path: Path, first: int = 1) -> list[str]:
    """Cells of a column that is read, of rows from `first` on; an error where one has none."""
    found = [cell for cell in cells if cell is not None]
    if len(found) < len(cells):
        n = first + list(cells).index(None)
        raise ValueError(f"{path}, object {n}, must have {name!r}, got null or nothing")
    return found


def _rows(path: Path, lines: Iterable[str]) -> Iterator[list[Cell]]:
    """The header of a table, then its rows, one or more; all cells as text."""
    kind, n = files.plain_suffix(path), 1
    each = iter(lines)
    lines = itertools.chain([next(each, "").removeprefix(MARK)], each)
    found: Iterator[list[Cell]]
    if kind == ".jsonl":
        found = _objects(path, lines)
    elif kind == ".tsv":  # published without quoting: a quote is a quote
        texts = (line.removesuffix("\n").rstrip("\r") for line in lines)
        found = (list(text.split("\t")) for text in texts if text)
    elif kind == ".csv":
        found = (list(row) for row in csv.reader(lines) if row)
    else:
        raise ValueError(f"{path} must be a .tsv, .csv or .jsonl file, packed or not, got {kind!r}")
    try:
        if header := next(found, []):
            yield header
        for n, cells in enumerate(found, 2):
            if len(cells) != len(header):
                raise ValueError(
                    f"{path}, row {n}, must have {len(header)} fields as the header has, "
                    f"got {len(cells)}"
                )
            yield cells
    except csv.Error as error:  # such as a cell of more than 131,072 characters
        raise ValueError(f"{path} must be a CSV file: {error}; .jsonl has no such limit") from None
    if n == 1:
        raise ValueError(f"{path} must have a header and one or more rows, got none")


def _objects(path: Path, lines: Iterable[str]) -> Iterator[list[Cell]]:
    """The names in the first object of JSON lines, then what each object has under them."""
    objects = (_object(text, path, n) for n, text in enumerate(lines, 1) if text.strip())
    header: list[str] = []
    for n, row in enumerate(objects):
        if n == 0:
            header = list(row)
            yield list(header)
        yield [None if row.get(name) is None else str(row[name]) for name in header]


def _object(line: str, path: Path, number: int) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}, must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number}, must be an object, got {type(found).__name__}")
    return found


def _require(name: str, columns: Iterable[str], path: Path, remedy: str) -> None:
    """An error unless a table has a column; `remedy` says how another one is named."""
    if name not in columns:
        raise ValueError(
            f"{path} must have the column {name!r}, got {', '.join(map(repr, columns))}: "
            f"{remedy} names another one"
        )


def _guess(columns: Iterable[str], path: Path, remedy: str) -> tuple[str, ...]:
    for names in TEXT_COLUMNS:
        if all(name in columns for name in names):
            return names
    raise ValueError(
        f"text must name the column with the texts, got none for {path}, which has "
        f"{', '.join(map(repr, columns))}: {remedy.format('text')} names it"
    )


def _classes(values: list[str]) -> tuple[Array, list[str]]:
    """Numbers in the order of their value, words in that of the alphabet."""
    names = sorted(set(values), key=lambda v: (0, int(v), v) if v.isdecimal() else (1, 0, v))
    if len(names) < 2:
        raise ValueError(f"label must have two or more values, got {names}")
    if len(names) > 1000:
        raise ValueError(f"label must be one of up to 1,000 classes, got {len(names)} values")
    numbers = {name: n for n, name in enumerate(names)}
    return np.array([numbers[value] for value in values], np.int64), names


def _by_split(names: list[str]) -> dict[str, Array]:
    if not any(names):
        return {}
    if unknown := set(names) - SPLIT_NAMES.keys():
        raise ValueError(
            f"split must be one of {', '.join(SPLIT_NAMES)}, got {', '.join(sorted(unknown))!r}"
        )
    found = np.array([SPLIT_NAMES[name] for name in names])
    return {split: np.flatnonzero(found == split) for split in dict.fromkeys(found.tolist())}
