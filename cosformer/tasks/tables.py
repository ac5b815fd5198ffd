"""Labelled texts from TSV, CSV and JSONL files, packed or not."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    splits: dict[str, Array] = field(default_factory=dict)
    """Split -> numbers of its samples, where the file says so."""


def read(paths: Mapping[str, Path], *, text: Sequence[str] = (), label: str = "label") -> Table:
    """All samples of a set; keys are splits, or "" where a column `split` may tell."""
    columns: dict[str, list[str]] = {}
    splits: list[str] = []
    for split, path in paths.items():
        found = _columns(path)
        count = len(next(iter(found.values())))
        names = tuple(text) or _guess(found, path)
        for name in (*names, label):
            if name not in found:
                option = "label" if name == label else "text"
                raise ValueError(
                    f"{path} must have the column {name!r}, got {', '.join(map(repr, found))}: "
                    f"--set task.options.{option}=COLUMN names another one"
                )
            columns.setdefault(name, []).extend(found[name])
        splits += [split] * count if split else found.get("split", [""] * count)
    labels, classes = _classes(columns[label])
    return Table(tuple(columns[name] for name in names), labels, classes, _by_split(splits))


def _columns(path: Path) -> dict[str, list[str]]:
    """Columns by name, all as text."""
    kind, content = files.plain_suffix(path), files.read_text(path)
    if kind == ".jsonl":
        rows = [_object(line, path, n) for n, line in enumerate(content.split("\n"), 1) if line]
        header = list(rows[0]) if rows else []
        for n, row in enumerate(rows, 1):
            if missing := [name for name in header if row.get(name) is None]:
                raise ValueError(f"{path}, object {n}, must have {missing[0]!r}, got {list(row)}")
        lines = [[str(row[name]) for name in header] for row in rows]
    elif kind in (".tsv", ".csv"):
        if kind == ".tsv":  # published without quoting: a quote is a quote
            table = [line.rstrip("\r").split("\t") for line in content.split("\n") if line]
        else:
            table = [row for row in csv.reader(io.StringIO(content, newline="")) if row]
        header, lines = (table[0], table[1:]) if table else ([], [])
    else:
        raise ValueError(f"{path} must be a .tsv, .csv or .jsonl file, packed or not, got {kind!r}")
    for n, cells in enumerate(lines, 2):
        if len(cells) != len(header):
            raise ValueError(
                f"{path}, row {n}, must have {len(header)} fields as the header has, "
                f"got {len(cells)}"
            )
    if not lines:
        raise ValueError(f"{path} must have a header and one or more rows, got none")
    return {name: [cells[n] for cells in lines] for n, name in enumerate(header)}


def _object(line: str, path: Path, number: int) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}, must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number}, must be an object, got {type(found).__name__}")
    return found


def _guess(columns: Mapping[str, object], path: Path) -> tuple[str, ...]:
    for names in TEXT_COLUMNS:
        if all(name in columns for name in names):
            return names
    raise ValueError(
        f"text must name the column with the texts, got none for {path}, which has "
        f"{', '.join(map(repr, columns))}: --set task.options.text=COLUMN names it"
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
