"""The state of a stream that keeps its tokens, all of them or the last few."""

from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.runtime import renewed


class Cache(NamedTuple):
    """Keys and values of earlier tokens, to which later queries may attend."""

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


def _real(key_mask: Tensor | None, k: Tensor) -> Tensor:
    if key_mask is not None:
        return key_mask
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
