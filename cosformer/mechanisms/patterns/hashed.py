"""Softmax over tokens that were sorted alike: each chunk sees itself and the one before."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.mechanisms.patterns.blocked import (
    Sums,
    divide,
    exp_sums,
    fold_vmapped,
    join,
    log_sum,
)
from cosformer.runtime import full_precision

SLICE = {"cpu": 2**19, "cuda": 2**27}
"""Scores made at once: a CPU keeps them in its cache, a GPU has room."""
ITSELF = -5e4  # the logit of a token with itself: chosen where there is nothing else


class Chunks(NamedTuple):
    """How sorted tokens meet."""

    size: int
    length: int
    """Tokens from here on are padding."""
    causal: bool


def hashed_attention(q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunks: Chunks) -> Tensor:
    """softmax(q kᵀ/√d) v over all rounds; q, k, v `[B, H, N, ·]`, order `[B, H, rounds, N]`.

    A pair that meets in several rounds counts as often. N is a multiple of the size of a chunk.
    """
    out, _ = _Hashed.apply(q / math.sqrt(q.shape[-1]), k, v, order, chunks)
    return out


class _Hashed(torch.autograd.Function):
    """Kept for the gradient: q, k, v, out, log Σ e^s. Scores are made again, as in `blocked`."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        found = [_forward(chunks, *heads) for heads in _groups(order, chunks, q, k, v)]
        out, log_total = (torch.cat(x).unflatten(0, q.shape[:2]) for x in zip(*found, strict=True))
        return out, log_total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, order, ctx.chunks = inputs
        ctx.save_for_backward(q, k, v, order, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, order, out, log_total = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        own = (grad * out).sum(-1, keepdim=True)
        own = own if grad_total is None else own - grad_total
        given = q, k, v, grad, log_total, own
        with full_precision(q):
            found = [_backward(ctx.chunks, *heads) for heads in _groups(order, ctx.chunks, *given)]
        grads = (torch.cat(x).unflatten(0, q.shape[:2]) for x in zip(*found, strict=True))
        return *grads, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return fold_vmapped(_Hashed.apply, info.batch_size, in_dims, args)


def _groups(order: Tensor, chunks: Chunks, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Heads `[g, ·, ·]` whose scores of a round fill about a slice, the order last."""
    count = max(1, _slice(order) // (2 * chunks.size * order.shape[-1]))
    flat = (x.flatten(0, 1).split(count) for x in (*tensors, order))
    return (list(heads) for heads in zip(*flat, strict=True))


def _slice(x: Tensor) -> int:
    return SLICE.get(x.device.type, SLICE["cuda"])


def _forward(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """The output `[g, N, V]` of some heads, and log Σ e^s of each row."""
    joined: Sums | None = None
    for where in order.unbind(1):
        rows, keys, values = (_sort(x, where, chunks) for x in (q, k, v))
        pieces = []
        for some, seen in _meetings(where, chunks):
            scores = _hide(rows[:, some] @ _pairs(keys, some).mT, *seen)
            pieces.append(exp_sums(scores, _pairs(values, some)))
        back = inverse(where)
        weighted, total, top = (
            _take(torch.cat(x, 1).flatten(1, 2), back) for x in zip(*pieces, strict=True)
        )
        found = weighted, total, top
        joined = found if joined is None else join((joined, found))
    assert joined is not None
    return divide(joined), log_sum(joined)


def _backward(
    chunks: Chunks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    log_total: Tensor,
    own: Tensor,
    order: Tensor,
) -> list[Tensor]:
    """dq, dk, dv of some heads from p = e^(s − log Σ): ds = p (g·v − own), dv = pᵀ g."""
    grads = [grad.new_zeros(x.shape) for x in (q, k, v)]  # `vmap` may have many of grad
    for where in order.unbind(1):
        rows, keys, values, upper, totals, mine = (
            _sort(x, where, chunks) for x in (q, k, v, grad, log_total, own)
        )
        pieces = []
        for some, (itself, hidden) in _meetings(where, chunks):
            near, theirs, g = _pairs(keys, some), _pairs(values, some), upper[:, some]
            p = _hide(rows[:, some] @ near.mT, itself, hidden).sub_(totals[:, some]).exp_()
            slope = (g @ theirs.mT).sub_(mine[:, some]).mul_(p).masked_fill_(itself, 0)
            pieces.append((slope @ near, slope.mT @ rows[:, some], p.mT @ g))
        to_rows, *to_pairs = (torch.cat(x, 1) for x in zip(*pieces, strict=True))
        back = inverse(where)
        sorted_grads = (to_rows, *(_unpair(x) for x in to_pairs))
        for sum_, x in zip(grads, sorted_grads, strict=True):
            sum_ += _take(x.flatten(1, 2), back)
    return grads


def _meetings(where: Tensor, chunks: Chunks) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """Chunks of a slice, which pairs in them are one token, and which do not count."""
    index = where.to(torch.int32).unflatten(1, (-1, chunks.size))  # [g C b]
    count = max(1, _slice(where) // (2 * chunks.size**2 * index.shape[0]))
    for first in range(0, index.shape[1], count):
        some = slice(first, first + count)
        i, j = index[:, some, :, None], _pairs(index[..., None], some).mT
        hidden = j >= chunks.length
        yield some, (i == j, hidden | (j > i) if chunks.causal else hidden)


def _hide(scores: Tensor, itself: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill_(itself, ITSELF).masked_fill_(hidden, -torch.inf)


def _pairs(x: Tensor, some: slice) -> Tensor:
    """These chunks, each with the one before it behind: `[g, C, b, D]` to `[g, c, 2b, D]`."""
    before = x[:, some.start - 1 : some.stop - 1] if some.start else x.roll(1, 1)[:, some]
    return torch.cat([x[:, some], before], 2)


def _unpair(x: Tensor) -> Tensor:
    """The sum of what each chunk is given by itself and by the one after it."""
    own, before = x.chunk(2, 2)
    return own + before.roll(-1, 1)


def _sort(x: Tensor, where: Tensor, chunks: Chunks) -> Tensor:
    return _take(x, where).unflatten(1, (-1, chunks.size))


def _take(x: Tensor, where: Tensor) -> Tensor:
    """Rows of `[g, N, D]` at `[g, N]`: whole rows, where `gather` would look up every number."""
    first = torch.arange(0, where.numel(), x.shape[1], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, (where + first).flatten()).unflatten(0, where.shape)


def inverse(where: Tensor) -> Tensor:
    """Where each token went, `[..., N]`."""
    index = torch.arange(where.shape[-1], device=where.device).expand_as(where)
    return torch.empty_like(where).scatter_(-1, where, index)
