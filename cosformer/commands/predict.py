"""`cosformer predict RUN`: the classes of texts, by a classifier that was trained here."""

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cosformer.check import check_new_file, check_whole
from cosformer.tasks import cut_note, empty_note, replacing, tables
from cosformer.training import Predictor, load

POSITIONAL = "run"


@dataclass(frozen=True)
class Options:
    """Classify texts, or pairs of texts: a line of output for each, in their order, with the label
    in the words of the training data and the probability of every label. The data that the run
    was trained on are not needed.

    cosformer predict runs/my-run --data rows.csv --format csv --out predicted.csv

    cosformer predict runs/my-run
    """

    run: Path
    """Folder of the run."""
    data: Path | None = None
    """A TSV, CSV or JSONL file, packed or not; standard input if not given: a text on each line, or
    a pair with a tab between its parts."""
    text: tuple[str, ...] = ()
    """Column of the texts, or two of pairs; those of the training data if not given."""
    format: Literal["jsonl", "csv"] = "jsonl"
    """Of the output."""
    out: Path | None = None
    """File to write, which is there once all is done; standard output if not given."""
    batch: int = 32
    """Texts that the model reads at once."""
    checkpoint: Literal["best", "last"] = "best"
    """The weights that were best on validation, or the last ones."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto: a GPU where there is one."""
    plugin: Path | None = None
    """Python file that registers the run's mechanism; the one of the run's config if not given."""

    def __post_init__(self) -> None:
        check_whole("batch", self.batch, 1)
        if len(self.text) > 2:
            raise ValueError(f"text must name one column or two, got {' '.join(self.text)}")
        if self.text and self.data is None:
            raise ValueError(f"text must be left out for standard input, got {' '.join(self.text)}")
        if self.out is not None:
            check_new_file("out", self.out)
            if self.data is not None and self.out.resolve() == self.data.resolve():
                raise ValueError(f"out must be another file than data, got {self.out} for both")


def run(options: Options) -> int:
    if options.data is not None and not options.data.is_file():
        raise ValueError(
            f"data must be a .tsv, .csv or .jsonl file, got {options.data}, which is no file"
        )
    found = load(options.run, options.checkpoint, device=options.device, plugin=options.plugin)
    predictor = Predictor.of(found)
    if predictor.labels is None:
        _say(f"{options.run} does not say what its labels are called: they are numbers from 0 on")
    lines = predicted(options, predictor)
    if options.out is None:
        for line in lines:
            print(line, end="")
        return 0
    with replacing(options.out) as file:
        for line in lines:
            file.write(line.encode())
    print(f"written: {options.out}")
    return 0


def predicted(options: Options, predictor: Predictor) -> Iterator[str]:
    """The lines of the output; at their end stderr tells of texts that were cut or empty."""
    labels: Sequence[str | int] = predictor.labels or range(predictor.model.config.classes or 0)
    if options.format == "csv":
        yield _csv(["label", *(f"probability_{label}" for label in labels)])
    texts = sequences = empty = cut = 0
    samples = _samples(options, predictor)
    while batch := list(itertools.islice(samples, options.batch)):
        columns = list(zip(*batch, strict=True))
        read = predictor.reader.read(columns)
        for row in predictor.answer(read).tolist():
            label, each = labels[row.index(max(row))], [round(value, 6) for value in row]
            if options.format == "csv":
                yield _csv([label, *each])
            else:
                found = {"label": label, "probabilities": dict(zip(labels, each, strict=True))}
                yield json.dumps(found, ensure_ascii=False) + "\n"
        texts, sequences = texts + sum(map(len, columns)), sequences + sum(map(len, read.towers))
        empty, cut = empty + read.empty, cut + read.cut
    for note in [*empty_note(empty, texts), *cut_note(cut, sequences, predictor.reader.length)]:
        _say(note)


def _samples(options: Options, predictor: Predictor) -> Iterator[tuple[str, ...]]:
    """The parts of each text, one or two, as many as the run was trained on."""
    columns, towers = predictor.columns, predictor.reader.towers
    parts = len(columns) or (2 if towers == 2 else None)  # None: the run does not say
    if options.data is None:
        for n, line in enumerate(_lines(), 1):
            text = line.removesuffix("\n")
            sample = tuple(text.split("\t")) if parts == 2 else (text,)
            if parts == 2 and len(sample) != 2:
                raise ValueError(
                    f"line {n} must be two texts with one tab between them, got {len(sample)} texts"
                )
            yield sample
        return
    for sample in tables.stream(options.data, options.text or columns):
        if parts not in (None, len(sample)):
            raise ValueError(
                f"text must name as many columns as the run was trained on, {parts}, "
                f"got {len(sample)} for {options.data}"
            )
        yield sample


def _lines() -> Iterator[str]:
    """Lines of standard input."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be text in UTF-8: {error}") from None


def _csv(cells: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _say(note: str) -> None:
    print(f"cosformer: predict: {note}", file=sys.stderr)
