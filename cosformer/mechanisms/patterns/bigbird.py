"""Big Bird ("Big Bird: Transformers for Longer Sequences", Zaheer et al., 2020)."""

import random
from collections.abc import Iterator
from functools import lru_cache
from operator import index

import torch
from torch import Tensor

from cosformer.check import check_whole
from cosformer.mechanisms.padding import without_padding
from cosformer.mechanisms.patterns.blocked import blocked_attention
from cosformer.mechanisms.patterns.masked import Masked
from cosformer.mechanisms.patterns.parts import Kept, Part, Sizes, columns
from cosformer.mechanisms.request import Request, repeat_heads
from cosformer.mechanisms.sdpa import by_products
from cosformer.mechanisms.seeded import Seeded, drawn_before
from cosformer.mechanisms.traits import Traits


class BigBird(Seeded, Masked):
    """A block sees its neighbours, the ends and a few random blocks; the two end blocks see all.

    The random blocks are a function of the seed and the number of blocks, the same for all heads,
    in training and afterwards.
    """

    traits = Traits(
        causal="no", cross=False, reads_mask=True, positions="absolute", multiple_of=64, random=True
    )
    source = "Zaheer et al., 2020 (ITC)"
    formula = (
        "out_i = Σ_j softmax_j(q_i·k_j / √d) v_j over blocks of i and j that are neighbours, "
        "first or last, or drawn for the block of i"
    )

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        block: int = 64,
        random_blocks: int = 3,
        seed: int = 0,
        impl: str = "auto",
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads, impl=impl)
        self.set_block(block)
        self.random_blocks = check_whole("random_blocks", random_blocks, 0)
        self.plant(seed)

    def pattern(self, keys: int, device: torch.device) -> Kept:
        block, last, near = self.block, (index(keys) - 1) // self.block, self.near(keys, device)

        def kept(i: Tensor, j: Tensor) -> Tensor:
            found = near(i, j)
            for side in (i // block, j // block):
                found = found | (side == 0) | (side == last)
            return found

        return kept

    def near(self, keys: int, device: torch.device) -> Kept:
        """Whether the block of i has that of j as a neighbour or among those drawn for it."""
        block, drawn = self.block, self.drawn(index(keys))
        chosen = torch.tensor(drawn, dtype=torch.int32, device=device)
        chosen = chosen.reshape(len(drawn), self.random_blocks)

        def kept(i: Tensor, j: Tensor) -> Tensor:
            row, column = i // block, j // block
            found = (row - column <= 1) & (column - row <= 1)
            for n in range(chosen.shape[1]):
                found = found | (chosen[row, n] == column)
            return found

        return kept

    def ranges(self, first: int, last: int, keys: int) -> Iterator[tuple[int, int]]:
        keys = index(keys)  # of a graph too: `in` finds no symbol
        final, drawn = (keys - 1) // self.block, self.drawn(keys)
        for row in range(first // self.block, (last - 1) // self.block + 1):
            for column in (row - 1, row, row + 1, *drawn[row]):
                if column not in (0, final):
                    yield column * self.block, (column + 1) * self.block

    def parts(self, sizes: Sizes, device: torch.device) -> tuple[Part, ...]:
        """The pairs of all queries but those of the first and last block, which see every key."""
        keys = index(sizes.keys)
        first, last, near = self.block, self._last(keys), self.near(keys, device)
        between = self.part(sizes, lambda i, j: near(i, j) & (j >= first) & (j < last))
        return between, columns([*range(first), *range(last, keys)], sizes)

    def drawn(self, keys: int) -> list[list[int]]:
        """The random blocks of every block; its own number stands where there are too few."""
        return draw_blocks(-(-keys // self.block), self.random_blocks, self.seed)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        alone, plain = super().attend, request._replace(key_mask=None)
        return without_padding(lambda q, k, v: alone(q, k, v, plain), request.key_mask, q, k, v)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        alone, plain = super().dense, request._replace(key_mask=None)
        return without_padding(lambda q, k: alone(q, k, plain), request.key_mask, q, k, square=True)

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, request: Request, impl: str) -> Tensor:
        first, last = self.block, self._last(k.shape[2])
        if last <= first:
            return self._whole(q, k, v, impl)
        rows = self._whole(torch.cat([q[:, :, :first], q[:, :, last:]], 2), k, v, impl)
        between = request._replace(start=first)
        out = super()._sparse(q[:, :, first:last], k, v, between, impl)
        return torch.cat([rows[:, :, :first], out, rows[:, :, first:]], 2)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, impl: str) -> Tensor:
        """The output of rows that see every key."""
        k, v = repeat_heads(k, q), repeat_heads(v, q)
        if impl == "flex":  # whose kernel has one program for all keys of a row
            return by_products(q, k, v, self.width**-0.5)
        every = tuple(range(-(-k.shape[2] // self.block)))
        part = Part(2 * self.block, self.block, (every,), None)
        return blocked_attention(q, k, v, None, Sizes(q.shape[2], k.shape[2], False, 0), (part,))

    def _last(self, keys: int) -> int:
        """Where the last block begins."""
        return (keys - 1) // self.block * self.block

    def pairs(self, length: int) -> int:
        seen = self.block * (3 + 2 + self.random_blocks) + 2 * self.block
        return length * min(length, seen)


@drawn_before
def draw_blocks(blocks: int, count: int, seed: int) -> list[list[int]]:
    return _draw_blocks(blocks, count, seed)  # a graph would look through a cache that is marked


@lru_cache(maxsize=16)
def _draw_blocks(blocks: int, count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    drawn = []
    for row in range(blocks):
        taken = {0, row - 1, row, row + 1, blocks - 1}
        found = draw.sample(range(blocks), min(blocks, count + len(taken)))
        fresh = [column for column in found if column not in taken][:count]
        drawn.append(fresh + [row] * (count - len(fresh)))
    return drawn
