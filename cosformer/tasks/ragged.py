"""Sequences of different lengths side by side in one array, with a label each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ragged:
    """Sequence n is `flat[starts[n] : starts[n + 1]]`; its label is `labels[n]`."""

    flat: Array
    starts: Array
    labels: Array

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.labels) + 1:
            raise ValueError(
                f"starts must be one more than labels, got {len(self.starts)} and "
                f"{len(self.labels)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Array:
        return self.flat[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> Array:
        return np.diff(self.starts)

    @classmethod
    def of(cls, sequences: Sequence[Array], labels: Any, dtype: Any = np.uint8) -> "Ragged":
        """From sequences one by one."""
        parts = [np.asarray(each, dtype) for each in sequences]
        flat = np.concatenate(parts) if parts else np.zeros(0, dtype)
        return cls(flat, _starts(list(map(len, parts))), np.asarray(labels, np.int64))

    @classmethod
    def of_rows(cls, rows: Array, labels: Array) -> "Ragged":
        """From sequences of one length, as pictures are, in one array."""
        return cls(rows.reshape(-1), np.arange(len(rows) + 1) * rows[0].size, labels)

    @classmethod
    def join(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The sequences of all parts, one part after the other."""
        starts = _starts(np.concatenate([part.lengths for part in parts]))
        labels = np.concatenate([part.labels for part in parts])
        return cls(np.concatenate([part.flat for part in parts]), starts, labels)

    def take(self, indices: Array) -> "Ragged":
        """The sequences with these numbers, in this order."""
        # slices, not a number for each token: those of Long-Range Arena would take gigabytes
        parts = [self[n] for n in np.asarray(indices).tolist()]
        flat = np.concatenate([self.flat[:0], *parts])
        starts = _starts(self.lengths[indices])
        return Ragged(flat, starts, self.labels[indices])


def _starts(lengths: Any) -> Array:
    """The first index of each sequence of these lengths in one array, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
