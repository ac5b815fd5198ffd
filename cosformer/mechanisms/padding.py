"""Padding taken out and put back, for mechanisms whose weights depend on absolute positions."""

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def ranks(key_mask: Tensor) -> Tensor:
    """How many real tokens stand before each token, `[B, S]`."""
    return key_mask.cumsum(1) - key_mask.long()


def real_first(key_mask: Tensor) -> Tensor:
    """The order of tokens with the real ones in front, else as they were, `[B, S]`."""
    return (~key_mask).to(torch.uint8).argsort(dim=1, stable=True)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of `[B, H, S, D]` in an order `[B, S]` of their own for each item."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def with_real_first(
    attend: Callable[..., Tensor], key_mask: Tensor, q: Tensor, k: Tensor, v: Tensor, start: int
) -> Tensor:
    """`attend(q, k, v, key_mask)` with the real tokens in front; zeros where the others stood.

    Queries are the last of the tokens, from `start` on. Nothing is read on the host.
    """
    order, absent = real_first(key_mask), ~key_mask[:, None, :, None]
    # a query for every key, 0 for those that are none: 0 · NaN would be the gradient of k
    rows = take(F.pad(q, (0, 0, start, 0)).masked_fill(absent, 0), order)
    out = attend(rows, take(k, order), take(v, order), key_mask.gather(1, order))
    out = take(out, order.argsort(1)).masked_fill(absent, 0)
    return out[:, :, start:]


def without_padding(
    function: Callable[..., Tensor], key_mask: Tensor | None, *inputs: Tensor, square: bool = False
) -> Tensor:
    """`function` on the real tokens alone; zeros where the others stood.

    Items with equally many real tokens go together. Inputs are `[B, H, S, D]`; the result is
    `[B, H, S, V]`, or `[B, H, S, S]` with `square`. The lengths are read on the host.
    """
    if key_mask is None or not len(key_mask):
        return function(*inputs)
    order = real_first(key_mask)
    groups: dict[int, list[int]] = defaultdict(list)
    for item, length in enumerate(key_mask.sum(1).tolist()):
        groups[length].append(item)
    results, items = [], []
    for length, members in groups.items():
        rows = torch.tensor(members, device=key_mask.device)
        chosen = order[rows, :length]
        found = function(*(take(x[rows], chosen) for x in inputs))
        results.append(_spread(found, chosen, key_mask.shape[1], square))
        items += members
    back = torch.tensor(items, device=key_mask.device).argsort()
    return torch.cat(results)[back]


def _spread(x: Tensor, order: Tensor, length: int, square: bool) -> Tensor:
    """`x[:, :, n]` at index `order[:, n]` of a tensor of zeros; with `square` columns as well."""
    index = order[:, None, :, None].expand_as(x)
    x = x.new_zeros(*x.shape[:2], length, x.shape[3]).scatter(2, index, x)
    return _spread(x.mT, order, length, False).mT if square else x


def to_multiple(x: Tensor, block: int) -> Tensor:
    """`[..., n, D]` with zeros behind it, up to a length that is a multiple of `block`.

    Where none are missing `F.pad` would copy, and a graph would not know its strides.
    """
    missing = -x.shape[-2] % block
    return F.pad(x, (0, 0, 0, missing)) if missing else x
