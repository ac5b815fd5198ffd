"""Softmax attention: by PyTorch's `scaled_dot_product_attention`, or by two products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.mechanisms.request import Request, repeat_heads, seen

LOWEST = -1e30
"""A logarithm of almost nothing; finite, so that differences and gradients are."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **pairs: Any) -> Tensor:
    """PyTorch's attention, for values of any width, and q and k that all items share.

    `pairs` are its arguments `attn_mask` and `is_causal`.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale  # of what is not padded
    grouped = q.shape[1] != k.shape[1]
    queries, keys, values = (x.expand(v.shape[0], -1, -1, -1) for x in _widened(q, k, v))
    out = F.scaled_dot_product_attention(
        queries, keys, values, scale=scale, enable_gqa=grouped, **pairs
    )
    return out[..., : v.shape[3]]


def sdpa_for(
    q: Tensor, k: Tensor, v: Tensor, request: Request, scale: float | None = None
) -> Tensor:
    """`sdpa` to what a request lets queries see; 0 where that is nothing."""
    if request.causal and request.key_mask is None and request.start == 0:
        return sdpa(q, k, v, scale, is_causal=True)
    found = seen(request, q.shape[2], k.shape[2], q.device)
    out = sdpa(q, k, v, scale, attn_mask=found)
    return out if found is None else out.masked_fill(~found.any(-1, keepdim=True), 0)


def sdpa_to_the_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal `sdpa` of queries of which the last stands at the last key.

    On a GPU no mask of all pairs is made, for which kernels of PyTorch's would be slower, too.
    """
    from torch.nn.attention.bias import causal_lower_right  # which loads all of torch.compile

    pairs = causal_lower_right(q.shape[2], k.shape[2])
    return sdpa(q, repeat_heads(k, q), repeat_heads(v, q), attn_mask=pairs)


def masked_softmax(score: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(score) over what the mask lets a query see; 0 where that is nothing."""
    if mask is None:
        return score.softmax(-1)
    weights = score.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0)


def by_products(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v with the scores in memory, for few queries or few keys.

    Where most of a GPU would be idle under PyTorch's attention, whose programs take a block of
    queries or of keys each. Every query must see a key.

    Args:
        q, k, v: `[…, T, D]`, `[…, S, D]`, `[…, S, V]`.
        mask: `[…, T, S]` bool, True for what is seen.
    """
    scores = q * scale @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def joined(outs: Sequence[Tensor], log_totals: Sequence[Tensor]) -> Tensor:
    """One output from those of disjoint sets of keys, weighted by Σ e^s `[..., T]`, maybe 0."""
    logs = torch.stack(list(log_totals))[..., None]
    weights = (logs - logs.detach().amax(0).clamp(min=LOWEST)).exp()
    total = weights.sum(0)  # at least 1 where there is a key, as the largest weight is 1
    shares = weights / (total + (total == 0))
    first, *others = (out * share for out, share in zip(outs, shares, strict=True))
    return sum(others, first).to(outs[0].dtype)


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with zeros up to a width that PyTorch has kernels for; else it stores scores."""
    width = max(q.shape[3], v.shape[3])
    width += -width % 8
    q, k, v = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    return q, k, v
