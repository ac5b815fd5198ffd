"""The pairs of a pattern, laid out in blocks: what `blocked` and `flex` compute."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.mechanisms.padding import to_multiple

ROWS, COLUMNS = 512, 128  # queries that share a copy of chosen keys, and keys in a block of them

Kept = Callable[[Tensor, Tensor], Tensor]
Ranges = Callable[[int, int], Iterable[tuple[int, int]]]


class Sizes(NamedTuple):
    """What the blocks of a call depend on."""

    queries: int
    keys: int
    causal: bool
    start: int  # the position of the first query


class Part(NamedTuple):
    """Pairs of a pattern, laid out so that a block of queries meets a list of whole key blocks."""

    query_block: int
    key_block: int
    """Tokens in a block; with a `stride`, a block is a class whatever these say."""
    lists: tuple[tuple[int, ...], ...]
    """For every block of queries the key blocks that it reads."""
    kept: Kept | None
    """Which pairs of positions (i, j) count; none that is not listed. None: all that are listed,
    and then lists leave nothing out but the future, as `flex` rounds blocks up to its own."""
    stride: int | None = None
    """Blocks are residue classes of this number instead of neighbours."""
    keys: Sequence[int] | Tensor | None = None
    """Positions of the only keys that are read: blocks are cut from these, side by side."""


def columns(positions: Sequence[int], sizes: Sizes) -> Part:
    """Every query and the keys at some positions, in order."""
    rows, block = min(ROWS, sizes.queries), min(COLUMNS, len(positions))
    count, stop = 0 if sizes.causal else len(positions), sizes.start + sizes.queries
    lists = []
    for first in range(sizes.start, stop, rows):
        end = min(first + rows, stop)
        while count < len(positions) and positions[count] < end:
            count += 1
        lists.append(tuple(range(-(-count // block))))
    return Part(rows, block, tuple(lists), None, keys=positions)


def neighbours(ranges: Ranges, sizes: Sizes, block: int, kept: Kept) -> Part:
    """Each block [first, last) of queries with the key blocks that cover `ranges(first, last)`."""
    lists, stop = [], sizes.start + sizes.queries
    for first in range(sizes.start, stop, block):
        last = min(first + block, stop)
        end = min(sizes.keys, last) if sizes.causal else sizes.keys
        wanted: set[int] = set()
        for low, high in ranges(first, last):
            low, high = max(low, 0), min(high, end)
            if low < high:
                wanted.update(range(low // block, -(-high // block)))
        lists.append(tuple(sorted(wanted)))
    return Part(block, block, tuple(lists), kept)


def in_order(x: Tensor, part: Part, of_keys: bool) -> Tensor:
    """Tokens `[..., n, D]` in the order of a part: some keys alone, or a class after another."""
    if of_keys and part.keys is not None:
        return x.index_select(-2, torch.as_tensor(part.keys, device=x.device))
    if part.stride is None:
        return x
    x = to_multiple(x, part.stride).unflatten(-2, (-1, part.stride))
    return x.transpose(-2, -3).flatten(-3, -2)


def as_before(x: Tensor, part: Part, length: int) -> Tensor:
    """Queries from the order of a part back to their own."""
    if part.stride is not None:
        x = x.unflatten(-2, (part.stride, -1)).transpose(-2, -3).flatten(-3, -2)
    return x[..., :length, :]
