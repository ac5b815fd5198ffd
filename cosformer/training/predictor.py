"""Texts in, classes out: a classifier with the vocabulary and the labels that it was trained on."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosformer.models import Classifier, PairClassifier
from cosformer.tasks import Read, Reader, option_of
from cosformer.training.evaluation import answers, autocast
from cosformer.training.loading import Loaded, kept_names


@dataclass(frozen=True)
class Predictor:
    """A classifier of texts, or of pairs of them; the data that it was trained on are not needed.

    >>> predictor = Predictor.of(load("runs/my-run"))
    >>> predictor.probabilities([["a text", "another"]])  # [2, classes], in the order of labels
    """

    model: Classifier | PairClassifier
    reader: Reader
    labels: tuple[str, ...] | None
    """What the classes are called; None: the run is older than these names, and has numbers."""
    columns: tuple[str, ...]
    """The columns of the table that the run learnt from; none: the run does not say."""
    precision: str = "float32"

    @classmethod
    def of(cls, run: Loaded) -> "Predictor":
        """The predictor of a loaded run; a run that does not classify texts is refused."""
        model, task = run.model, run.config.task
        if not isinstance(model, Classifier | PairClassifier):
            raise ValueError(f"run must be of a classifier, got {task.name}, a {model.config.kind}")
        towers = 2 if isinstance(model, PairClassifier) else 1
        reader = Reader(run.vocabulary, option_of(task.name, task.options, "length"), towers)
        names = kept_names(run.folder)
        if names is not None and len(names.labels) != model.config.classes:
            raise ValueError(
                f"labels of {run.folder} must be the {model.config.classes} classes of its model, "
                f"got {len(names.labels)}"
            )
        columns = () if names is None else names.columns
        labels = None if names is None else names.labels
        return cls(model, reader, labels, columns, run.config.precision)

    def probabilities(self, texts: Sequence[Sequence[str]]) -> Tensor:
        """`[B, classes]`, float32, on the CPU, of `B` texts in one column or pairs in two."""
        _check_columns(texts, len(self.columns) or (2 if self.reader.towers == 2 else None))
        return self.answer(self.reader.read(texts))

    @torch.no_grad()
    def answer(self, read: Read) -> Tensor:
        """`probabilities` of texts that the reader has read."""
        device = next(self.model.parameters()).device
        batch = self.reader.batch(read, device)
        with autocast(device, self.precision):
            logits = answers(self.model, batch)
        return logits.float().softmax(-1).cpu()


def _check_columns(texts: Sequence[Sequence[str]], parts: int | None) -> None:
    """Refuse what are no columns of texts; `parts`: how many the run learnt from, if it is known.

    A string is a sequence of strings: a list of texts would be read as columns of letters.
    """
    if isinstance(texts, str) or any(isinstance(column, str) for column in texts):
        found = "a string" if isinstance(texts, str) else "a string as a column"
        raise TypeError(f"texts must be columns, as [['a text', 'another']], got {found}")
    for text in itertools.chain.from_iterable(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts must be columns of strings, got {type(text).__name__}")
    if len(texts) not in ((1, 2) if parts is None else (parts,)):
        wanted = "1 or 2" if parts is None else parts
        raise ValueError(f"texts must have as many columns as the run, {wanted}, got {len(texts)}")
    lengths = [len(column) for column in texts]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"texts must be columns of one length from 1 on, got {lengths}")
