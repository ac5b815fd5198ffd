"""Sequences of tokens from outside: checked, and put side by side."""

import numbers
from collections.abc import Sequence

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


def check_tokens(name: str, sequences: Sequence[Tokens], vocabulary: int) -> None:
    """Refuse sequences one of which `check_sequence` refuses."""
    if not isinstance(sequences, Sequence):
        raise TypeError(f"{name} must be a sequence of sequences, got {type(sequences).__name__}")
    for n, sequence in enumerate(sequences):
        check_sequence(f"{name}[{n}]", sequence, vocabulary)


def check_sequence(name: str, sequence: Tokens, vocabulary: int) -> None:
    """Refuse what is no sequence of one token or more, each a whole number below `vocabulary`."""
    if not isinstance(sequence, Sequence) or isinstance(sequence, str):
        raise TypeError(f"{name} must be a sequence of ints, got {type(sequence).__name__}")
    if len(sequence) == 0:
        raise ValueError(f"{name} must have at least one token, got none")
    for token in sequence:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise TypeError(f"{name} must be a sequence of ints, got {token!r} in it")
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} must hold tokens from 0 to {vocabulary - 1}, got {token}")
