"""Sequences of tokens from outside: checked, and put side by side."""

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Tokens = Sequence[int]


def pad(
    sequences: Sequence[Tokens], device: torch.device, *, left: bool
) -> tuple[Tensor, Tensor | None]:
    """Tokens `[B, longest]` and their key mask, which is None where all are equally long."""
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64, device=device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        columns = slice(longest - len(sequence), None) if left else slice(len(sequence))
        tokens[row, columns] = torch.tensor(list(sequence), device=device)
        mask[row, columns] = True
    return tokens, None if all(len(each) == longest for each in sequences) else mask


def check_tokens(name: str, sequences: Sequence[Tokens], vocabulary: int) -> list[Tokens]:
    """The sequences, each as `check_sequence` gives it; refuses what is no sequence of them."""
    sequences = _listed(sequences)
    if not isinstance(sequences, Sequence):
        raise TypeError(f"{name} must be a sequence of sequences, got {type(sequences).__name__}")
    return [check_sequence(f"{name}[{n}]", each, vocabulary) for n, each in enumerate(sequences)]


def check_sequence(name: str, sequence: Tokens, vocabulary: int) -> Tokens:
    """The sequence, which may be an array or a tensor; refuses what is no sequence of one token or
    more, each a whole number below `vocabulary`."""
    sequence = _listed(sequence)
    if not isinstance(sequence, Sequence) or isinstance(sequence, str):
        raise TypeError(f"{name} must be a sequence of ints, got {type(sequence).__name__}")
    if len(sequence) == 0:
        raise ValueError(f"{name} must have at least one token, got none")
    for token in sequence:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise TypeError(f"{name} must be a sequence of ints, got {token!r} in it")
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} must hold tokens from 0 to {vocabulary - 1}, got {token}")
    return sequence


def _listed(given: Any) -> Any:
    """What an array or a tensor holds; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given
