"""What a mechanism is asked to do, once its arguments are checked."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Controls = Mapping[str, Tensor]
"""The name of a control -> a number for every token and key head, `[B, H_kv, S]`."""
NO_CONTROLS: Controls = {}


class Split(Protocol):
    """Ranks of which each has a stretch of every sequence; `cosformer.distributed` makes it."""

    def meanwhile(self, work: Callable[[], Tensor | None]) -> "Split":
        """These ranks; their `attention` and `linear_attention` will do this work while they wait.

        If the work returns a tensor, that is used as the queries.
        """

    def start(self, tokens: int) -> int:
        """How many tokens stand before those of this rank, which has `tokens` of them."""

    def total(self, tokens: int) -> int:
        """How many tokens all ranks have together; this rank has `tokens` of them."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`ops.attention` over all ranks."""

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`ops.linear_attention` over all ranks."""

    def neighbours(self, x: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
        """Some tokens before and after those of this rank, `[B, T, C]`; zeros at the ends."""

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of all ranks, along a dimension of x."""

    def check_padding(self, key_mask: Tensor) -> None:
        """Refuse a mask `[B, T]` whose padding is not last, over all ranks."""


class Request(NamedTuple):
    """How to attend: what `attend`, `advance` and `dense` of a mechanism receive beside q, k, v."""

    causal: bool
    key_mask: Tensor | None  # [B, S] bool, True = real token; k, v and controls are 0 elsewhere
    start: int  # the key index that the first query stands at
    controls: Controls  # name -> [B, H_kv, S], before any activation

    @property
    def options(self) -> dict[str, Any]:
        """Causality, mask and start, under the names of the arguments of `ops.attention`."""
        return {"causal": self.causal, "key_mask": self.key_mask, "query_start": self.start}


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros at masked tokens of `[B, H, S, …]`, whatever stood there: 0 · NaN would be NaN."""
    if key_mask is None:
        return x
    return x.masked_fill(~key_mask.view(x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3)), 0)


def repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    """k `[B, H_kv, S, D]` as `[B, H, S, D]`: each head repeated for its query heads."""
    groups = q.shape[1] // k.shape[1]
    return k if groups == 1 else k.repeat_interleave(groups, 1)


def unit_values(k: Tensor) -> Tensor:
    """The columns of the identity as values for keys `[B, H_kv, S, D]`: out = A v is A itself."""
    identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    return identity.expand(*k.shape[:2], -1, -1)


def seen(request: Request, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys a query may see by causality and mask, bool `[B or 1, 1, T, S]`; None for all."""
    found = None if request.key_mask is None else request.key_mask[:, None, None, :]
    if not request.causal or request.start >= keys - 1:  # the first query sees every key
        return found
    i = torch.arange(queries, device=device)[:, None] + request.start
    past = (torch.arange(keys, device=device) <= i)[None, None]
    return past if found is None else past & found
