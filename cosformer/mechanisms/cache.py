"""The states of streams: those that keep tokens, and all of them in memory of a fixed size.

There every tensor stays where it is, and a step changes it. So a step can be recorded as a CUDA
graph, and streams at different positions take it together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.ops import State
from cosformer.runtime import renewed


class Cache(NamedTuple):
    """Keys and values of earlier tokens, all of them or the last few, for later queries."""

    k: Tensor  # [B, H_kv, kept, D]
    v: Tensor  # [B, H_kv, kept, V]
    key_mask: Tensor | None  # [B, kept]; None as long as no token was masked
    position: int  # tokens so far, forgotten ones included
    owner: str  # the class of the mechanism

    def check_tokens(self, k: Tensor, v: Tensor) -> None:
        """Refuse keys and values that do not fit behind those of the cache."""
        for name, kept, x in (("keys", self.k, k), ("values", self.v, v)):
            if kept.shape[:2] != x.shape[:2] or kept.shape[3] not in (0, x.shape[3]):
                raise ValueError(
                    f"state must hold {name} {list(x.shape[:2])} of width {x.shape[3]}, "
                    f"got {list(kept.shape)}"
                )

    def append(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> "Cache":
        """The cache with the next tokens behind it."""
        mask = None
        if self.key_mask is not None or key_mask is not None:
            mask = torch.cat([_real(self.key_mask, self.k), _real(key_mask, k)], 1)
        # autocast may have begun since
        keys, values = torch.cat([self.k.to(k.dtype), k], 2), torch.cat([self.v.to(v.dtype), v], 2)
        position = self.position + k.shape[2]
        return renewed(self, k=keys, v=values, key_mask=mask, position=position)

    def last(self, count: int) -> "Cache":
        """The last `count` tokens; the memory of those before is given back."""
        drop = self.k.shape[2] - count
        if drop <= 0:
            return self
        mask = None if self.key_mask is None else self.key_mask[:, drop:].clone()
        k, v = self.k[:, :, drop:].clone(), self.v[:, :, drop:].clone()
        return renewed(self, k=k, v=v, key_mask=mask)


class HeldCache(NamedTuple):
    """Keys and values in memory for so many tokens of each stream; token n lies at n mod length."""

    k: Tensor  # [B, H_kv, length, D]
    v: Tensor  # [B, H_kv, length, V]
    position: Tensor  # [B] int64: tokens so far, which the model counts for all its layers
    owner: str  # the class of the mechanism

    def write(self, k: Tensor, v: Tensor) -> None:
        """Put the next token `[B, H_kv, 1, ·]` of every stream where it belongs."""
        entry = (self.position % self.k.shape[2])[:, None, None, None]
        for mine, given in ((self.k, k), (self.v, v)):
            if mine.shape[3]:
                mine.scatter_(2, entry.expand_as(given), given.to(mine.dtype))

    def entries(self) -> Tensor:
        """`[1, length]`: the numbers of the entries."""
        return torch.arange(self.k.shape[2], device=self.k.device)[None]

    def put(self, row: int, cache: Cache, of: int, position: int) -> None:
        """Make `row` the stream `of` of a cache, which has `position` real tokens so far."""
        for mine, given in ((self.k, cache.k), (self.v, cache.v)):
            tokens = given[of]  # [H_kv, kept, ·]
            if cache.key_mask is not None:
                tokens = tokens[:, cache.key_mask[of]]
            kept = tokens.shape[1]
            entries = torch.arange(position - kept, position, device=mine.device) % mine.shape[2]
            mine[row].zero_()  # NaN of the stream before would stay NaN behind a mask: 0 · NaN
            mine[row].index_copy_(1, entries, tokens.to(mine.device, mine.dtype))

    def take(self, row: int, count: int) -> Cache:
        """The last `count` tokens of a stream, as a cache of their own."""
        position = int(self.position[row])
        entries = torch.arange(position - count, position, device=self.k.device) % self.k.shape[2]
        k, v = (x[row : row + 1].index_select(2, entries) for x in (self.k, self.v))
        return Cache(k, v, None, position, self.owner)


def map_streams(change: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    """`state` with `change(tensor, …)` for every tensor whose first dimension is the streams.

    `others` are states of the same form, whose tensors `change` gets too. What all streams share,
    as a horizon for each head, stays as it is.
    """
    if isinstance(state, Tensor):
        return change(state, *others)
    if isinstance(state, State):
        names = ["key_value", "key_sum", "position"] + ["log_decay"] * state.per_token
        changed: dict[str, Any] = {
            name: change(*(getattr(each, name) for each in (state, *others))) for name in names
        }
        return state._replace(**changed)
    if isinstance(state, tuple):
        parts = [map_streams(change, *each) for each in zip(state, *others, strict=True)]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def keep_in_place(state: Any, after: Any) -> None:
    """Write `after` into the tensors of `state`, where a step has made new ones."""

    def change(mine: Tensor, theirs: Tensor) -> Tensor:
        return mine if mine is theirs else mine.copy_(theirs)

    map_streams(change, state, after)


def with_positions(state: Any, batch: int) -> Any:
    """A state of sums in which every stream has a position of its own."""
    if isinstance(state, State):
        return state._replace(position=state.position.reshape(-1).expand(batch).clone())
    if isinstance(state, tuple):
        return type(state)(*(with_positions(part, batch) for part in state))
    return state


def _real(key_mask: Tensor | None, k: Tensor) -> Tensor:
    if key_mask is not None:
        return key_mask
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
