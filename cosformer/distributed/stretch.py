"""Which tokens a rank has: a stretch of every sequence, and where packed sequences cut it."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cosformer.check import check_packing, check_whole


class Stretch(NamedTuple):
    """The tokens of this rank among those of its group; ranks follow each other."""

    group: dist.ProcessGroup
    rank: int
    lengths: tuple[int, ...]  # how many tokens each rank has

    @property
    def start(self) -> int:
        """How many tokens the ranks before this one have."""
        return sum(self.lengths[: self.rank])

    @property
    def end(self) -> int:
        return self.start + self.lengths[self.rank]

    @property
    def total(self) -> int:
        """How many tokens all ranks have."""
        return sum(self.lengths)

    def check_told(self, told: Tensor) -> None:
        """Refuse other lengths than those that the ranks have told each other, `[ranks]`."""
        if told.is_cuda:  # nobody waits for a GPU to look
            mine = torch.tensor(self.lengths, dtype=told.dtype, device=told.device)
            torch._assert_async((mine == told).all(), "lengths must be those of the ranks")
            return
        mine = torch.tensor(self.lengths, dtype=told.dtype)
        if not torch.equal(mine, told):
            raise ValueError(
                f"lengths must be how many tokens each rank has, {told.long().tolist()}, got "
                f"{list(self.lengths)}; without lengths all ranks must have as many"
            )


class Piece(NamedTuple):
    """Neighbouring tokens of one sequence on this rank."""

    rows: slice  # among the tokens of the rank
    position: int  # of the first token in its sequence
    sequence_length: int  # on all ranks together


class Reach(NamedTuple):
    """The ranks whose states reach this one: those that share a sequence with its ends."""

    first: int
    last: int


class Cut(NamedTuple):
    """A stretch as sequences cut it; `first` and `last` are the same where none ends inside it."""

    first: Piece
    last: Piece
    between: tuple[int, ...]  # where the whole sequences between the two begin and end, if any do
    reach: Reach


def stretch_of(
    tokens: int, lengths: Sequence[int] | None, group: dist.ProcessGroup | None
) -> Stretch:
    """The stretch of a rank that has so many tokens; a group of None is that of all ranks."""
    group = check_group(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if lengths is None:
        return Stretch(group, rank, (tokens,) * ranks)
    check_lengths(lengths, ranks)
    if lengths[rank] != tokens:
        raise ValueError(
            f"lengths[{rank}] must be the tokens of this rank, {tokens}, got {lengths[rank]}"
        )
    return Stretch(group, rank, tuple(lengths))


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group that this rank is in; that of all ranks for None."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "group needs processes that know each other: call "
            "torch.distributed.init_process_group() first, in a program started by torchrun"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup of this rank, got {type(group).__name__}")
    return group


def check_lengths(lengths: Sequence[int], ranks: int) -> None:
    """A number of tokens for each rank."""
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise TypeError(f"lengths must be a sequence of ints, got {type(lengths).__name__}")
    if len(lengths) != ranks:
        raise ValueError(
            f"lengths must be one for each of {ranks} ranks, got {len(lengths)}: {list(lengths)}"
        )
    for n, length in enumerate(lengths):
        check_whole(f"lengths[{n}]", length, 0)


def read_bounds(cu_seqlens: Tensor | None, x: Tensor, stretch: Stretch) -> list[int]:
    """Where sequences begin and end, counted over all ranks; x `[B, H, T, D]` has the stretch."""
    if cu_seqlens is None:
        return [0, stretch.total]
    whole = x[:, :, :1].new_empty(()).expand(x.shape[0], 1, stretch.total, 1)
    check_packing(cu_seqlens, whole, whole)
    bounds: list[int] = cu_seqlens.tolist()
    return bounds


def cut(bounds: Sequence[int], stretch: Stretch) -> Cut:
    """The pieces of a stretch; `bounds` are where sequences begin and end, on all ranks."""
    start, end = stretch.start, stretch.end
    inner = sorted({bound for bound in bounds if start < bound < end})
    edges = [start, *inner, end]

    def piece(begin: int, stop: int) -> Piece:
        opened, closed = _opened(bounds, begin), _closed(bounds, max(stop, begin + 1))
        return Piece(slice(begin - start, stop - start), begin - opened, closed - opened)

    first = piece(edges[0], edges[1])
    last = piece(edges[-2], edges[-1]) if inner else first
    between = tuple(bound - start for bound in inner) if len(inner) > 1 else ()
    return Cut(first, last, between, _reach(bounds, stretch))


def _reach(bounds: Sequence[int], stretch: Stretch) -> Reach:
    ends = list(accumulate(stretch.lengths))
    opened, closed = _opened(bounds, stretch.start), _closed(bounds, stretch.end)
    first = last = stretch.rank
    while first > 0 and ends[first - 1] > opened:
        first -= 1
    while last < len(ends) - 1 and ends[last] < closed:
        last += 1
    return Reach(first, last)


def _opened(bounds: Sequence[int], token: int) -> int:
    """Where the sequence of a token begins."""
    return bounds[max(bisect_right(bounds, token) - 1, 0)]


def _closed(bounds: Sequence[int], stop: int) -> int:
    """Where the sequence of the token before `stop` ends."""
    return bounds[min(bisect_left(bounds, stop), len(bounds) - 1)]
