"""Classification of sentences and pairs of them: known sets, or tables of the user's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cosformer.tasks import files, tables
from cosformer.tasks import vocabulary as vocabularies
from cosformer.tasks.base import SPLITS, Batch, require_options, special_token
from cosformer.tasks.ragged import Array, Ragged
from cosformer.tasks.resident import Resident
from cosformer.tasks.sequences import (
    SequenceTask,
    complete,
    cut_note,
    empty_note,
    facts_of_classes,
)


def classify(
    *,
    data: Path | str | None = None,
    name: str | None = None,
    text: Sequence[str] | str = (),
    label: str = "label",
    towers: int = 1,
    tokens: vocabularies.Kind = "bytes",
    vocabulary: int | None = None,
    length: int = 512,
    learnt: vocabularies.Vocabulary | None = None,
    device: torch.device | str = "cpu",
) -> SequenceTask:
    """Labelled texts: the known set `name` in the folder `data`, or `data` is a table itself.

    With one tower, a pair is one sequence with a separator between its parts, the longer part cut
    first. `text` names one column or two, `label` that of the classes.
    """
    require_options(length=length, towers=towers)
    table = _table(data, name, (text,) if isinstance(text, str) else text, label)
    if towers > 2 or (towers == 2 and len(table.texts) != 2):
        raise ValueError(f"towers must be 1, or 2 for pairs of texts, got {towers}")
    if len(table.texts) == 2 and towers == 1 and length < 3:
        raise ValueError(f"length must be 3 or more for pairs, got {length}")
    indices = complete(table.splits, len(table.labels))
    seen = b"\n".join(c[n].encode() for n in indices["train"] for c in table.texts)
    kind = vocabularies.create(tokens, seen, vocabulary, learnt)
    facts = facts_of_classes(
        table.labels[indices["test"]],
        classes=len(table.classes),
        length=length,
        data_tokens=kind.size,
        towers=towers,
    )
    read = Reader(kind, length, towers).read(table.texts)
    notes = empty_note(read.empty, sum(map(len, table.texts)))
    if len(table.texts) == 2 and towers == 1:  # the task itself counts those that are not joined
        notes += cut_note(read.cut, len(table.labels), length)
    whole = [_ragged(tower, table.labels, facts.vocabulary) for tower in read.towers]
    splits = {split: [tower.take(indices[split]) for tower in whole] for split in SPLITS}
    names = tables.Names(tuple(table.classes), table.columns)
    return SequenceTask(splits, facts, device, kind, notes, names)


class Read(NamedTuple):
    """Texts as sequences of tokens."""

    towers: list[list[Array]]
    """The sequences of each tower, none of which is empty."""
    empty: int
    """Texts that had no token, and are one start token now."""
    cut: int
    """Sequences that are longer than the reader's length; joined ones are cut already."""


@dataclass(frozen=True)
class Reader:
    """How a classifier reads texts, the same where it learns and where it predicts."""

    vocabulary: vocabularies.Vocabulary
    length: int
    """No sequence of a batch is longer."""
    towers: int = 1
    """2: the parts of a pair are read apart; 1: as one sequence with a separator between them."""

    def read(self, columns: Sequence[Sequence[str]]) -> Read:
        """Sequences of one column of texts, or of two whose texts are pairs."""
        found = [[self.vocabulary.encode(text) for text in column] for column in columns]
        empty = sum(not len(each) for column in found for each in column)
        if len(found) == 2 and self.towers == 1:
            pairs = list(zip(*found, strict=True))
            cut = sum(len(first) + 1 + len(second) > self.length for first, second in pairs)
            separator = special_token("separator", self.vocabulary.size)
            found = [[join(first, second, separator, self.length) for first, second in pairs]]
        else:
            cut = sum(len(each) > self.length for column in found for each in column)
        # an empty text is one token: a sequence with none has no mean
        nothing = np.array([special_token("start", self.vocabulary.size)])
        towers = [[each if len(each) else nothing for each in column] for column in found]
        return Read(towers, empty, cut)

    def batch(self, read: Read, device: torch.device | str) -> Batch:
        """What a model is called with: all sequences side by side, without labels."""
        batch: Batch = {}
        pad = special_token("pad", self.vocabulary.size)
        for suffix, tower in zip(("", "2"), read.towers, strict=False):
            numbers = np.arange(len(tower))
            ragged = _ragged(tower, numbers, special_token("start", self.vocabulary.size) + 1)
            whole = Resident(ragged, pad=pad, length=self.length, device=torch.device(device))
            batch[f"tokens{suffix}"], batch[f"mask{suffix}"] = whole.gather(numbers)
        return batch


def join(first: Array, second: Array, separator: int, length: int) -> Array:
    """Two sequences as one of at most `length`: what is cut is cut from the longer one."""
    room = length - 1
    kept = min(len(second), max(room // 2, room - len(first)))
    parts = (first[: room - kept], [separator], second[:kept])
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _table(
    data: Path | str | None, name: str | None, text: Sequence[str], label: str
) -> tables.Table:
    if len(text) > 2:
        raise ValueError(f"text must name one column or two, got {text!r}")
    if name is None:
        if data is None or not Path(data).is_file():
            found = "which is a folder" if data and Path(data).is_dir() else "which does not exist"
            raise ValueError(
                "data must be a table of texts and labels (a .tsv, .csv or .jsonl file), got "
                + ("none" if data is None else f"{data}, {found}")
            )
        return tables.read({"": Path(data)}, text=text, label=label)
    if name not in tables.KNOWN:
        raise ValueError(f"name must be one of {', '.join(tables.KNOWN)}, got {name!r}")
    if text or label != "label":
        raise ValueError(f"text and label must not be given beside a name, got {text!r}, {label!r}")
    known_set, where = tables.KNOWN[name], files.folder(data)
    paths = {split: files.require(where / file, name) for split, file in known_set.files.items()}
    return tables.read(paths, text=known_set.text, label=known_set.label)


def _ragged(sequences: Sequence[Array], labels: Array, vocabulary: int) -> Ragged:
    return Ragged.of(sequences, labels, np.int16 if vocabulary <= 2**15 else np.int32)
