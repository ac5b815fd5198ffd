"""What a mechanism is asked to do, once its arguments are checked."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Controls = Mapping[str, Tensor]
"""The name of a control -> a number for every token and key head, `[B, H_kv, S]`."""
NO_CONTROLS: Controls = {}


class Request(NamedTuple):
    """How to attend: what `attend`, `advance` and `dense` of a mechanism receive beside q, k, v."""

    causal: bool
    key_mask: Tensor | None  # [B, S] bool, True = real token; k, v and controls are 0 elsewhere
    start: int  # the key index that the first query stands at
    controls: Controls  # name -> [B, H_kv, S], before any activation

    @property
    def options(self) -> dict[str, Any]:
        """All but the controls, as the functions of `ops` name it."""
        return {"causal": self.causal, "key_mask": self.key_mask, "query_start": self.start}


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros at masked tokens of `[B, H, S, …]`, whatever stood there: 0 · NaN would be NaN."""
    if key_mask is None:
        return x
    return x.masked_fill(~key_mask.view(x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3)), 0)


def repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    """k with a head for every head of q."""
    groups = q.shape[1] // k.shape[1]
    return k if groups == 1 else k.repeat_interleave(groups, 1)


def seen(request: Request, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys a query may see by causality and mask, bool `[B or 1, 1, T, S]`; None for all."""
    found = None if request.key_mask is None else request.key_mask[:, None, None, :]
    if not request.causal or request.start >= keys - 1:  # the first query sees every key
        return found
    i = torch.arange(queries, device=device)[:, None] + request.start
    past = (torch.arange(keys, device=device) <= i)[None, None]
    return past if found is None else past & found
