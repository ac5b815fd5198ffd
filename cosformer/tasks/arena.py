"""Long-Range Arena (Tay et al. 2021): five tasks on a thousand tokens and more."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosformer.tasks import files, generated, tables
from cosformer.tasks.base import SPLITS, Facts, require_options
from cosformer.tasks.classify import classify
from cosformer.tasks.listops import TOKENS
from cosformer.tasks.ragged import Array, Ragged
from cosformer.tasks.rising import RisingTask
from cosformer.tasks.sequences import SequenceTask, complete, facts_of_classes
from cosformer.tasks.snakes import LENGTHS, by_length
from cosformer.tasks.vocabulary import Bytes

Device = torch.device | str
SIZES = {"listops": (96_000, 2_000, 2_000), "pathfinder": (160_000, 20_000, 20_000)}
"""Tasks that are generated, and samples of their splits as published."""
PIXELS = 32 * 32
"""The length of a picture as a sequence."""
PAIRS, DOCUMENTS, PICTURES = "aan_pairs.tsv.xz", "aan_docs_4k.jsonl.xz", "cifar10_gray.npz"


def listops(
    *,
    data: Path | str | None = None,
    sizes: tuple[int, int, int] = SIZES["listops"],
    seed: int = 0,
    length: int = 2_000,
    workers: int = 1,
    device: Device = "cpu",
) -> SequenceTask:
    """The value of nested operators on digits. Generated when it is not in the folder yet."""
    counts = sets_of("listops", {"sizes": sizes})
    found = _made("listops", counts, data, seed, workers)
    facts = Facts(
        data_tokens=len(TOKENS),
        classes=10,
        length=length,
        asks="sequence",
        metric="accuracy",
        floor=_by_root(found, sizes),
        floor_is="the root operator alone; about 0.49 with the digits right below it",
    )
    return SequenceTask(_cut(found, sizes), facts, device)


def pathfinder(
    *,
    data: Path | str | None = None,
    sizes: tuple[int, int, int] = SIZES["pathfinder"],
    seed: int = 0,
    rising: int = 0,
    workers: int = 1,
    device: Device = "cpu",
) -> SequenceTask:
    """Whether two marked ends belong to one path, 1,024 pixels. Generated likewise.

    `rising`: steps of training on paths of 1 dash, then of 2, and so on below the 14 that all
    have otherwise; as many such pictures as train are generated for it (the set `snakes`).
    """
    counts = sets_of("pathfinder", {"sizes": sizes, "rising": rising})
    found = _made("pathfinder", counts, data, seed, workers)
    judged = found.labels[len(found) - sizes[2] :]
    facts = facts_of_classes(judged, classes=2, length=PIXELS)
    splits = _cut(found, sizes)
    if not rising:
        return SequenceTask(splits, facts, device)

    def easier() -> list[Ragged]:
        levels = by_length(_made("snakes", counts, data, seed, workers))
        if missing := [n for n, level in enumerate(levels, 1) if not len(level)]:
            path = generated.path_of("snakes", data, count=counts["snakes"], seed=seed)
            raise ValueError(
                f"{path} must have paths of every length, got none of {missing[0]}: without it, "
                "it is made anew"
            )
        return levels

    return RisingTask(splits, facts, device, easier=easier, levels=LENGTHS, steps=rising)


def sets_of(task: str, options: Mapping[str, Any]) -> dict[str, int]:
    """The generated sets that a task with these options is made of, and the samples of each."""
    if task not in SIZES:
        return {}
    sizes, rising = options.get("sizes", SIZES[task]), options.get("rising", 0)
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"sizes must be three numbers from 1 on, got {sizes}")
    if rising < 0:
        raise ValueError(f"rising must be at least 0, got {rising}")
    if rising and sizes[0] < LENGTHS:
        raise ValueError(f"sizes must begin with {LENGTHS} or more to be rising, got {sizes}")
    return {task: sum(sizes)} | ({"snakes": sizes[0]} if rising else {})


def text(
    *, data: Path | str | None = None, length: int = 4_000, device: Device = "cpu"
) -> SequenceTask:
    """Whether a film review (IMDB) is positive, from its bytes."""
    return classify(name="imdb", data=data, length=length, device=device)


def retrieval(
    *, data: Path | str | None = None, length: int = 4_000, device: Device = "cpu"
) -> SequenceTask:
    """Whether one paper cites another, from the bytes of both, encoded apart.

    The pairs are real citations of the ACL Anthology, but not the published pairs: results are
    not comparable with published ones.
    """
    require_options(length=length)
    where = files.folder(data)
    paths = [files.require(where / name, "retrieval") for name in (PAIRS, DOCUMENTS)]
    table = tables.read({"": paths[0]}, text=("doc1", "doc2"))
    documents = _documents(paths[1])
    if missing := {each for column in table.texts for each in column} - documents.keys():
        raise ValueError(f"{paths[1]} must hold every paper of the pairs, got no {min(missing)!r}")
    names = list(documents)
    numbers = {name: n for n, name in enumerate(names)}
    library = Ragged.of([documents[name] for name in names], np.zeros(len(names)))
    indices = complete(table.splits, len(table.labels))
    judged = table.labels[indices["test"]]
    facts = facts_of_classes(judged, classes=2, length=length, towers=2)
    splits = {
        split: [
            replace(
                library.take(np.array([numbers[column[n]] for n in indices[split]])),
                labels=table.labels[indices[split]],
            )
            for column in table.texts
        ]
        for split in SPLITS
    }
    called = tables.Names(tuple(table.classes), ())  # its columns hold names of papers, not texts
    return SequenceTask(splits, facts, device, Bytes(), names=called)


def image(*, data: Path | str | None = None, device: Device = "cpu") -> SequenceTask:
    """The class of a grey CIFAR-10 picture, 1,024 pixels in a row; 45,000 / 5,000 / 10,000."""
    path = files.require(files.folder(data) / PICTURES, "image")
    arrays = files.load_arrays(path)
    if missing := {"x_train", "y_train", "x_test", "y_test"} - arrays.keys():
        raise ValueError(f"{path} must hold x and y of train and test, got no {min(missing)}")
    pictures = np.concatenate([arrays["x_train"], arrays["x_test"]])
    labels = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64)
    train = len(arrays["x_train"])
    indices = complete(
        {"train": np.arange(train), "test": np.arange(train, len(labels))}, len(labels)
    )
    whole = Ragged.of_rows(pictures, labels)
    facts = facts_of_classes(labels[indices["test"]], classes=10, length=PIXELS)
    return SequenceTask({s: [whole.take(indices[s])] for s in SPLITS}, facts, device)


def _made(
    name: str, counts: Mapping[str, int], data: Path | str | None, seed: int, workers: int
) -> Ragged:
    path = generated.make(name, data, count=counts[name], seed=seed, workers=workers)
    return generated.load(path)


def _by_root(found: Ragged, sizes: tuple[int, int, int]) -> float:
    """Accuracy on the test split of the most frequent label that each root has in training."""
    roots, labels = found.flat[found.starts[:-1]], found.labels
    train, test = slice(sizes[0]), slice(len(found) - sizes[2], None)
    counts = np.zeros((len(TOKENS), 10), np.int64)
    np.add.at(counts, (roots[train], labels[train]), 1)
    return float((counts.argmax(axis=1)[roots[test]] == labels[test]).mean())


def _cut(found: Ragged, sizes: tuple[int, int, int]) -> dict[str, list[Ragged]]:
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return {split: [found.take(part)] for split, part in zip(SPLITS, parts, strict=True)}


def _documents(path: Path) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for number, line in enumerate(files.read_text(path).split("\n"), 1):
        if not line:
            continue
        try:
            paper = json.loads(line)
            found[paper["id"]] = np.frombuffer(paper["text"].encode(), np.uint8)
        except (ValueError, KeyError, TypeError) as error:
            message = f"{path}, line {number}, must be an object with id and text"
            raise ValueError(f"{message}: {error!r}") from None
    return found
