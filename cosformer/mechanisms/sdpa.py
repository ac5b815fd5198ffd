"""PyTorch's attention, `scaled_dot_product_attention`, for shapes it alone would serve badly."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cosformer.mechanisms.padding import to_multiple
from cosformer.mechanisms.request import Request, repeat_heads, seen

PIECE = {"cuda": 2048}
"""Queries in a piece, on devices that want several of them."""
GRID = 65_535
"""Heads at once: CUDA launches no more in a direction other than the first."""

_lock = threading.RLock()


def few_keys(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v for many queries.

    The gradient is computed for a hundred keys of a head by one multiprocessor, so that few keys
    keep few busy: pieces of the queries go as heads of their own.

    Values may be more exact than q: their mean is then kept apart, as weights that sum to 1 allow,
    or gradients of nearly equal values would be those of their rounding.

    Args:
        q, k, v: `[B, H, T, D]`, `[B, H_kv, S, D]`, `[B, H_kv, S, V]`.
    """
    if v.dtype != q.dtype:
        level = v.mean(2, keepdim=True).detach()
        apart = few_keys(q, k, (v - level).to(q.dtype), scale)
        return apart + repeat_heads(level, q).to(q.dtype)
    (heads, length), size = q.shape[1:3], PIECE.get(q.device.type)
    pieces = 1 if size is None else max(-(-length // size), 1)
    if pieces == 1:
        return sdpa(q, k, v, scale)
    rows = to_multiple(q, pieces).unflatten(2, (pieces, -1)).flatten(1, 2)
    k, v = (x.repeat_interleave(rows.shape[1] // x.shape[1], 1) for x in (k, v))
    return sdpa(rows, k, v, scale).unflatten(1, (heads, pieces)).flatten(2, 3)[:, :, :length]


def few_queries(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v for many keys, which FlashAttention parts among multiprocessors."""
    with without_cudnn(q):
        return sdpa(q, k, v, scale)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **pairs: Any) -> Tensor:
    """PyTorch's, for values of any width, and q and k of one item for all.

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


def by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q kᵀ/√D) v of every block by itself, which goes as a head and has its own mask.

    Args:
        q, k, v: `[B, H, N, b, D]`, `[B, H, N, S, D]`, `[B, H, N, S, V]`.
        mask: `[N, b, S]`, True for what is seen.
    """
    if len(mask) > GRID:
        pieces = zip(*(x.split(GRID, 2) for x in (q, k, v)), mask.split(GRID), strict=True)
        return torch.cat([by_blocks(*piece) for piece in pieces], 2)
    rows, k, v = (x.flatten(0, 1) for x in (q, k, v))
    with without_cudnn(q):
        out = sdpa(rows, k, v, attn_mask=mask[None])
    return out.unflatten(0, q.shape[:2])


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with zeros up to a width that PyTorch has kernels for; else it stores scores."""
    width = max(q.shape[3], v.shape[3])
    width += -width % 8
    q, k, v = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    return q, k, v


@contextmanager
def without_cudnn(x: Tensor) -> Iterator[None]:
    """PyTorch's first choice on Hopper is cuDNN; a caller's own choice without Flash stays."""
    allowed = torch.backends.cuda
    compiling = torch.compiler.is_compiling()  # which cannot ask for that choice
    if not x.is_cuda or compiling or not allowed.flash_sdp_enabled():
        yield
        return
    with _lock:  # of two threads, one would restore what the other had changed
        kept = [SDPBackend.FLASH_ATTENTION]
        if allowed.mem_efficient_sdp_enabled():
            kept.append(SDPBackend.EFFICIENT_ATTENTION)
        if allowed.math_sdp_enabled():
            kept.append(SDPBackend.MATH)
        with sdpa_kernel(kept):
            yield
