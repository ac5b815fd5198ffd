"""Softmax over tokens that were sorted alike: each chunk sees itself and the one before."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.mechanisms.patterns.flex import run_compiled
from cosformer.mechanisms.recompute import recomputed
from cosformer.runtime import compute_dtype, untraced

SLICE = {"cpu": 2**19, "cuda": 2**27}
"""Scores made at once: a CPU keeps them in its cache, a GPU has room."""
ITSELF = -5e4  # the logit of a token with itself: chosen where there is nothing else


class Chunks(NamedTuple):
    """How sorted tokens meet."""

    size: int  # tokens in a chunk
    length: int  # tokens from here on are padding
    causal: bool


def hashed_attention(q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunks: Chunks) -> Tensor:
    """softmax(q kᵀ/√d) v over all rounds; q, k, v `[B, H, N, ·]`, order `[B, H, rounds, N]`.

    A pair that meets in several rounds counts as often. N is a multiple of the size of a chunk.
    The backward pass makes the scores again: kept is what is as long as q, k and v.
    """
    rows = (q / math.sqrt(q.shape[-1]), k, v, order)
    if q.is_cuda and untraced():  # one graph of all rounds: no pass over the scores but products
        flat = (x.flatten(0, 1) for x in rows)
        return run_compiled(_attend, chunks, *flat, on=q).unflatten(0, q.shape[:2])
    count = max(1, _most(q) // (2 * chunks.size * q.shape[2]))
    groups = zip(*(x.flatten(0, 1).split(count) for x in rows), strict=True)
    return torch.cat([_attend(chunks, *heads) for heads in groups]).unflatten(0, q.shape[:2])


def _attend(chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Tensor:
    """The output `[g, N, V]` of some heads: rounds weighted by their Σ e^s."""
    found = [recomputed(_round, chunks, q, k, v, sorting) for sorting in order.unbind(1)]
    outs, logs = zip(*found, strict=True)
    shares = torch.stack(logs).softmax(0)
    joined = outs[0] * shares[0]
    for out, share in zip(outs[1:], shares[1:], strict=True):
        joined = joined + out * share
    return joined.to(v.dtype)


def _round(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, sorting: Tensor
) -> tuple[Tensor, Tensor]:
    """The output `[g, N, V]` of one round, and log Σ e^s `[g, N, 1]`."""
    taken = (*(_take(x, sorting) for x in (q, k, v)), sorting[..., None])
    rows, keys, values, i = (x.unflatten(1, (-1, chunks.size)) for x in taken)
    near, theirs, j = (torch.cat([x, x.roll(1, 1)], 2) for x in (keys, values, i))
    count = max(1, _most(q) // (2 * chunks.size**2 * q.shape[0]))
    parts = zip(*(x.split(count, 1) for x in (rows, near, theirs, i, j)), strict=True)
    found = [_softmax(chunks, *part) for part in parts]
    back = sorting.argsort(-1)
    out, log = (torch.cat(x, 1).flatten(1, 2) for x in zip(*found, strict=True))
    return _take(out, back), _take(log, back)


def _softmax(
    chunks: Chunks, rows: Tensor, keys: Tensor, values: Tensor, i: Tensor, j: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax of some chunks `[g, c, b, D]` over `[g, c, 2b, D]`; i and j are their tokens."""
    hidden = j.mT >= chunks.length
    hidden = hidden | (j.mT > i) if chunks.causal else hidden
    scores = (rows @ keys.mT).to(compute_dtype(rows.dtype))
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(i == j.mT, ITSELF)
    log = scores.logsumexp(-1, keepdim=True)
    return (scores - log).exp().to(values.dtype) @ values, log


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of `[g, N, D]` at `[g, N]`: whole rows, where `gather` would look up every number."""
    first = torch.arange(0, order.numel(), x.shape[1], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, (order + first).flatten()).unflatten(0, order.shape)


def _most(x: Tensor) -> int:
    return SLICE.get(x.device.type, SLICE["cuda"])
