"""Exact softmax over a pattern of pairs, block by block: time and memory follow the pattern."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.mechanisms.padding import to_multiple
from cosformer.mechanisms.patterns.parts import Part, Sizes, as_before, in_order
from cosformer.mechanisms.sdpa import LOWEST
from cosformer.runtime import compute_dtype, full_precision, join_batch

SLICE = 2**20  # scores made at once: 4 MB in float32

Sums = tuple[Tensor, Tensor, Tensor]
Parts = tuple[Part, ...]


class Slice(NamedTuple):
    """Scores that are made at once."""

    some: Tensor  # [g]: blocks of queries
    chosen: Tensor  # [g, m]: the key blocks of each
    seen: Tensor  # [B, 1, g, b, m·c]: which pairs count
    more: bool  # these queries have met other keys before


def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sizes: Sizes, parts: Parts
) -> Tensor:
    """softmax(q kᵀ/√d) v over the pairs of disjoint parts."""
    dtype = compute_dtype(q.dtype)
    inputs = q.to(dtype) / math.sqrt(q.shape[-1]), k.to(dtype), v.to(dtype)
    out, _ = _Blocked.apply(*inputs, key_mask, sizes, parts)
    return out.to(q.dtype)


class _Blocked(torch.autograd.Function):
    """Nothing that is longer than q, k and v is kept for the gradient: scores are made again.

    log Σ e^s is a result with a gradient of its own, which is what lets the backward pass, made
    of differentiable steps, be differentiated in turn.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sizes: Sizes, parts: Parts
    ) -> tuple[Tensor, Tensor]:
        """The output, and log Σ e^s of each row, +inf for a row without a key."""
        sums: list[Sums] = []
        for part in parts:
            rows = _arrange(q, part, False)  # [B H G b D]
            keys, values = _arrange(k, part, True), _arrange(v, part, True)  # [B H N c ·]
            found = [q.new_zeros(*rows.shape[:4], width) for width in (v.shape[3], 1, 1)]
            for some, chosen, seen, more in _slices(q, k, key_mask, sizes, part):
                of_keys = _select(keys, 2, chosen), _select(values, 2, chosen)
                pieces = softmax_sums(rows.index_select(2, some), *of_keys, seen)
                if more:
                    weighted, total, top = (x.index_select(2, some) for x in found)
                    pieces = join(((weighted, total, top), pieces))
                for whole, piece in zip(found, pieces, strict=True):
                    whole.index_copy_(2, some, piece)
            weighted, total, top = (_restore(x, part, q.shape[2], False) for x in found)
            sums.append((weighted, total, top))
        values, total, top = join(sums)
        # log Σ = +inf for a row without a key, so that e^(s − log Σ) is 0
        log_total = torch.where(total > 0, top + total.log(), torch.inf)
        # not in place: compiled by PyTorch 2.11, that would have no gradient
        return values / torch.where(total > 0, total, 1), log_total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.sizes, ctx.parts = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv from p = e^(s − log Σ): ds = p (g·v − own), dv = pᵀ g; own = g·out − dlogΣ."""
        q, k, v, key_mask, out, log_total = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        own = (grad * out).sum(-1, keepdim=True)
        if grad_total is not None:
            own = own - grad_total
        grads: list[Any] = [None, None, None]
        with full_precision(q):
            for part in ctx.parts:
                rows = [_arrange(x, part, False) for x in (q, grad, log_total, own)]
                keys, values = _arrange(k, part, True), _arrange(v, part, True)
                # of `grad`, which `vmap` may have many of
                to_rows, to_keys, to_values = (
                    grad.new_zeros(x.shape) for x in (rows[0], keys, values)
                )
                for some, chosen, seen, _ in _slices(q, k, key_mask, ctx.sizes, part):
                    queries, upper, total, mine = (x.index_select(2, some) for x in rows)
                    near, theirs = _select(keys, 2, chosen), _select(values, 2, chosen)
                    p = (queries @ near.mT).sub_(total).masked_fill_(~seen, -torch.inf).exp_()
                    slope = (upper @ theirs.mT).sub_(mine).mul_(p)
                    to_rows.index_add_(2, some, slope @ near)
                    _add(to_keys, chosen, slope.mT @ queries)
                    _add(to_values, chosen, p.mT @ upper)
                found = (to_rows, q, False), (to_keys, k, True), (to_values, k, True)
                grads = [
                    _restore(x, part, like.shape[2], of_keys, onto)
                    for (x, like, of_keys), onto in zip(found, grads, strict=True)
                ]
        return *grads, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        sizes: Sizes,
        parts: Parts,
    ) -> tuple[Any, Any]:
        """The mapped dimension joins the batch, the first of every tensor."""
        of_q, of_k, of_v, of_mask, _, _ = in_dims
        size, batch = info.batch_size, q.shape[0 if of_q is None else int(of_q == 0)]
        q, k, v = (join_batch(x, dim, size, batch) for x, dim in ((q, of_q), (k, of_k), (v, of_v)))
        if key_mask is not None:
            key_mask = join_batch(key_mask, of_mask, size, batch)
        results = _Blocked.apply(q, k, v, key_mask, sizes, parts)
        return tuple(x.unflatten(0, (size, batch)) for x in results), (0, 0)


def _slices(
    q: Tensor, k: Tensor, key_mask: Tensor | None, sizes: Sizes, part: Part
) -> Iterator[Slice]:
    """The pairs of a part: blocks of queries with all of their keys, or, if many, some."""
    device = q.device
    i = _arrange(_positions(sizes.start, sizes.queries, device), part, False)  # [G b 1]
    j = _arrange(_positions(0, sizes.keys, device), part, True)  # [N c 1]
    every = torch.ones(1, sizes.keys, dtype=torch.bool, device=device)
    real = every if key_mask is None else key_mask
    real = _arrange(real[..., None], part, True)[..., 0]  # [B N c]
    for members in _like(part.lists):
        rows = torch.tensor(members, device=device)
        blocks = _filled([part.lists[row] for row in members], device)  # -1 = none
        each = q.shape[0] * q.shape[1] * i.shape[1] * j.shape[1]
        room = max(1, SLICE // max(1, each))
        count = max(1, room // blocks.shape[1])
        for some, listed in zip(rows.split(count), blocks.split(count), strict=True):
            for n, few in enumerate(listed.split(room, 1)):
                chosen = few.clamp(min=0)
                where = j[chosen].flatten(1)[:, None]  # [g 1 m·c]
                seen = (few >= 0).repeat_interleave(j.shape[1], 1)[:, None]
                if part.kept is not None:
                    seen = seen & part.kept(i[some], where)
                if sizes.causal:
                    seen = seen & (where <= i[some])
                seen = seen & _select(real, 1, chosen)[:, None, :, None]
                yield Slice(some, chosen, seen, n > 0)


def join(sums: Sequence[Sums]) -> Sums:
    """The sums over disjoint sets of keys as one, in the memory of the first."""
    (values, total, top), *others = sums
    for more_values, more_total, more_top in others:
        most = torch.maximum(top, more_top)
        mine, theirs = (top - most).exp_(), (more_top - most).exp_()
        values.mul_(mine).addcmul_(more_values, theirs)
        total.mul_(mine).addcmul_(more_total, theirs)
        top = most
    return values, total, top


def softmax_sums(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Sums:
    """Σ e^(s − top) v, Σ e^(s − top) and the constant top = max s over the seen keys of a row."""
    scores = (q @ k.mT).masked_fill(~seen, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=LOWEST)
    weights = (scores - top).exp()
    return weights @ v, weights.sum(-1, keepdim=True), top


def _positions(first: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)[:, None]


def _like(lists: tuple[tuple[int, ...], ...]) -> Iterable[list[int]]:
    """Blocks of queries whose lists have about the same length."""
    like: dict[int, list[int]] = defaultdict(list)
    for row, blocks in enumerate(lists):
        like[len(blocks).bit_length()].append(row)
    return like.values()


def _filled(lists: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Lists of different lengths as one tensor, -1 behind the ends; never without a column."""
    longest = max(1, *(len(blocks) for blocks in lists))
    rows = [[*blocks, *[-1] * (longest - len(blocks))] for blocks in lists]
    return torch.tensor(rows, device=device)


def _select(x: Tensor, dim: int, blocks: Tensor) -> Tensor:
    """The blocks of a list, end to end: `[..., N, c, ...]` to `[..., g, m·c, ...]` at `dim`."""
    chosen = x.index_select(dim, blocks.flatten()).unflatten(dim, blocks.shape)
    return chosen.flatten(dim + 1, dim + 2)


def _add(x: Tensor, blocks: Tensor, values: Tensor) -> None:
    """Add `[B, H, g, m·c, D]` to the blocks `[g, m]` of x `[B, H, N, c, D]`."""
    pieces = values.unflatten(3, (blocks.shape[1], x.shape[3])).flatten(2, 3)
    x.index_add_(2, blocks.flatten(), pieces)


def _arrange(x: Tensor, part: Part, of_keys: bool) -> Tensor:
    """`[..., n, D]` as blocks `[..., N, c, D]`, zeros behind the last token."""
    length, x = x.shape[-2], in_order(x, part, of_keys)
    block = part.key_block if of_keys else part.query_block
    block = block if part.stride is None else -(-length // part.stride)
    return to_multiple(x, block).unflatten(-2, (-1, block))


def _restore(
    x: Tensor, part: Part, length: int, of_keys: bool, onto: Tensor | None = None
) -> Tensor:
    """Blocks as tokens again, added to what there is; zeros where no block has the token."""
    x = x.flatten(-3, -2)
    if not of_keys or part.keys is None:
        x = as_before(x, part, length)
        return x if onto is None else onto.add_(x)
    where = torch.as_tensor(part.keys, device=x.device)
    onto = x.new_zeros(*x.shape[:-2], length, x.shape[-1]) if onto is None else onto
    return onto.index_add_(-2, where, x[..., : len(where), :])
