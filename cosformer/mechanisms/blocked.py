"""Exact softmax over a pattern of pairs, block by block: time and memory follow the pattern."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cosformer.ops.problem import compute_dtype

SLICE = 2**20  # scores made at once: 4 MB in float32
LOWEST = -1e30  # the maximum of a row without a key; finite, so that differences are

Kept = Callable[[Tensor, Tensor], Tensor]
Ranges = Callable[[int, int], Iterable[tuple[int, int]]]
Sums = tuple[Tensor, Tensor, Tensor]


class Part(NamedTuple):
    """Pairs of a pattern, laid out so that a block of queries meets a list of whole key blocks."""

    query_block: int
    key_block: int
    lists: tuple[tuple[int, ...], ...]
    """For every block of queries the key blocks that it reads."""
    kept: Kept
    """Which of the pairs (i, j) in those blocks count; i and j are positions."""
    stride: int | None = None
    """Blocks are residue classes of this number instead of neighbours."""


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Iterable[Part],
    *,
    causal: bool,
    key_mask: Tensor | None,
    start: int,
) -> Tensor:
    """softmax(q kᵀ/√d) v over the pairs of disjoint parts; the first query stands at `start`."""
    dtype = compute_dtype(q.dtype)
    inputs = q.to(dtype) / math.sqrt(q.shape[-1]), k.to(dtype), v.to(dtype)
    sums = [_part_sums(*inputs, part, causal, key_mask, start) for part in parts]
    return divide(sums).to(q.dtype)


def divide(sums: Sequence[Sums]) -> Tensor:
    """Σ_p e^top_p values_p / Σ_p e^top_p total_p; zeros for a row without a key."""
    values, total, top = (torch.stack(x) for x in zip(*sums, strict=True))
    scale = (top - top.amax(0)).exp()
    total = (total * scale).sum(0)
    return (values * scale).sum(0) / torch.where(total > 0, total, 1)


def neighbours(
    ranges: Ranges,
    *,
    queries: int,
    keys: int,
    query_block: int,
    key_block: int,
    causal: bool,
    start: int,
) -> tuple[tuple[int, ...], ...]:
    """The key blocks that cover `ranges(first, last)`, for each block [first, last) of queries."""
    lists = []
    for first in range(start, start + queries, query_block):
        last = min(first + query_block, start + queries)
        end = min(keys, last) if causal else keys
        wanted: set[int] = set()
        for low, high in ranges(first, last):
            low, high = max(low, 0), min(high, end)
            if low < high:
                wanted.update(range(low // key_block, -(-high // key_block)))
        lists.append(tuple(sorted(wanted)))
    return tuple(lists)


def _part_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: Part,
    causal: bool,
    key_mask: Tensor | None,
    start: int,
) -> Sums:
    """Σ e^(s − top) v `[B, H, T, V]`, Σ e^(s − top) and top `[B, H, T, 1]` of one part."""
    queries, keys, device = q.shape[2], k.shape[2], q.device
    every = torch.ones(1, keys, dtype=torch.bool, device=device)
    real = _arrange((every if key_mask is None else key_mask)[..., None], part, True)[..., 0]
    i = _arrange(_positions(start, queries, device), part, False)  # [G b 1]
    j = _arrange(_positions(0, keys, device), part, True)  # [N c 1]
    q, k, v = _arrange(q, part, False), _arrange(k, part, True), _arrange(v, part, True)
    order: list[int] = []
    sums: list[Sums] = []
    for members in _like(part.lists):
        rows = torch.tensor(members, device=device)
        blocks = _table([part.lists[row] for row in members], device)  # [g m], -1 = none
        chosen = blocks.clamp(min=0)
        # One gather for all slices: each one's gradient is as large as k.
        of_rows = q.index_select(2, rows), _select(k, 2, chosen), _select(v, 2, chosen)
        count = max(1, SLICE // (of_rows[0][:, :, 0, :, 0].numel() * of_rows[1].shape[3]))
        pieces = zip(*(x.split(count, 2) for x in of_rows), strict=True)
        for n, (queries_, keys_, values_) in enumerate(pieces):
            now = slice(n * count, (n + 1) * count)
            where = j[chosen[now]].flatten(1)[:, None]  # [g 1 m·c]
            seen = part.kept(i[rows[now]], where)
            seen = seen & (blocks[now] >= 0).repeat_interleave(j.shape[1], 1)[:, None]
            if causal:
                seen = seen & (where <= i[rows[now]])
            seen = seen & _select(real, 1, chosen[now])[:, None, :, None]  # [B 1 g b m·c]
            sums.append(softmax_sums(queries_, keys_, values_, seen))
        order += members
    back = torch.tensor(order, device=device).argsort()
    joined = [torch.cat(pieces, 2).index_select(2, back) for pieces in zip(*sums, strict=True)]
    values, total, top = (_restore(x, part, queries) for x in joined)
    return values, total, top


def softmax_sums(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Sums:
    """Σ e^(s − top) v, Σ e^(s − top) and the constant top = max s over the seen keys of a row."""
    return exp_sums((q @ k.mT).masked_fill(~seen, -torch.inf), v)


def exp_sums(scores: Tensor, v: Tensor) -> Sums:
    """The same of scores, -inf for a key that is not seen."""
    top = scores.detach().amax(-1, keepdim=True).clamp(min=LOWEST)
    weights = (scores - top).exp()
    return weights @ v, weights.sum(-1, keepdim=True), top


def _positions(first: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)[:, None]


def _like(lists: tuple[tuple[int, ...], ...]) -> Iterable[list[int]]:
    """Blocks of queries whose lists have about the same length."""
    like: dict[int, list[int]] = defaultdict(list)
    for row, blocks in enumerate(lists):
        like[len(blocks).bit_length()].append(row)
    return like.values()


def _table(lists: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Lists of different lengths as one tensor, -1 behind the ends; never without a column."""
    longest = max(1, *(len(blocks) for blocks in lists))
    rows = [[*blocks, *[-1] * (longest - len(blocks))] for blocks in lists]
    return torch.tensor(rows, device=device)


def _select(x: Tensor, dim: int, blocks: Tensor) -> Tensor:
    """The blocks of a list, end to end: `[..., N, c, ...]` to `[..., g, m·c, ...]` at `dim`."""
    return (
        x.index_select(dim, blocks.flatten()).unflatten(dim, blocks.shape).flatten(dim + 1, dim + 2)
    )


def _arrange(x: Tensor, part: Part, of_keys: bool) -> Tensor:
    """`[..., n, D]` as blocks `[..., N, c, D]`, zeros behind the last token."""
    length = x.shape[-2]
    block = part.stride or (part.key_block if of_keys else part.query_block)
    x = F.pad(x, (0, 0, 0, -length % block)).unflatten(-2, (-1, block))
    return x if part.stride is None else x.transpose(-2, -3)


def _restore(x: Tensor, part: Part, length: int) -> Tensor:
    return (x if part.stride is None else x.transpose(-2, -3)).flatten(-3, -2)[..., :length, :]
