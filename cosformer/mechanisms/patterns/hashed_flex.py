"""Softmax over tokens that were sorted alike (`hashed.py`) through FlexAttention.

Rounds are heads of sorted tokens. What sorts, unsorts and joins them reads whole rows and adds to
none, forward and backward.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosformer.mechanisms.patterns.blocked import LOWEST
from cosformer.mechanisms.patterns.flex import (
    Sizes,
    are_short,
    attend_blocks,
    differentiated_once,
    lay,
    require_flex,
    run_compiled,
    with_mask,
)
from cosformer.mechanisms.patterns.hashed import Chunks, inverse
from cosformer.mechanisms.patterns.parts import Part
from cosformer.ops.problem.memo import Memo
from cosformer.runtime import untraced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_blocks: "Memo[BlockMask]" = Memo()


def flex_hashed(q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunks: Chunks) -> Tensor:
    """As `hashed_attention`, with the first derivative alone."""
    others = "'chunked'"
    require_flex(q, k, v, others)
    back, rounds = inverse(order), order.shape[2]
    rows, keys, values = (_Sorted.apply(x, order, back).flatten(1, 2) for x in (q, k, v))
    blocks = with_mask(_meeting(order, chunks), _seen(order, chunks))
    found = run_compiled(attend_blocks, rows, keys, values, blocks, True, _but_itself, on=q)
    outs, logs = (x.unflatten(1, (-1, rounds)) for x in found)
    return differentiated_once(_Joined.apply(outs, logs, order, back), others)


class _Sorted(torch.autograd.Function):
    """Tokens `[B, H, N, D]` in the order of every round, `[B, H, r, N, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return run_compiled(_taken, x, order, on=x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return run_compiled(_summed, grad, back, on=grad), None, None


class _Joined(torch.autograd.Function):
    """The rounds of every token, weighted by Σ e^s: `[B, H, N, D]`."""

    @staticmethod
    def forward(ctx: Any, outs: Tensor, logs: Tensor, order: Tensor, back: Tensor) -> Tensor:
        out, top, total = run_compiled(_weighted, outs, logs, back, on=outs)
        ctx.save_for_backward(out, top, total, outs, logs, order)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *run_compiled(_parted, grad, *ctx.saved_tensors, on=grad), None, None


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """`[B, H, N, D]` or `[B, H, N]` at the places `[B, H, r, N]` of every round."""
    return _rows(x.unsqueeze(2).expand(*places.shape, *x.shape[3:]), places)


def _rows(x: Tensor, places: Tensor) -> Tensor:
    places = places if x.dim() == 4 else places[..., None].expand_as(x)
    return x.gather(3, places)


def _summed(x: Tensor, back: Tensor) -> Tensor:
    return _rows(x, back).sum(2)


def _weighted(outs: Tensor, logs: Tensor, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_r e^l out / Σ_r e^l, top = max l, Σ e^(l − top): its log would vanish beside `ITSELF`."""
    logs = _rows(logs, back)
    top = logs.amax(2).clamp(min=LOWEST)  # padding may have no key
    scale = (logs - top.unsqueeze(2)).exp()
    total = scale.sum(2)
    total = torch.where(total > 0, total, 1)
    weighted = (_rows(outs, back) * scale[..., None]).sum(2)
    return (weighted / total[..., None]).to(outs.dtype), top, total


def _parted(
    grad: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    outs: Tensor,
    logs: Tensor,
    order: Tensor,
) -> tuple[Tensor, Tensor]:
    """d outs = share · g, d logs = share · (g·outs − g·out), in the order of the rounds."""
    dtype = logs.dtype
    own = (grad.to(dtype) * out.to(dtype)).sum(-1)
    share = (logs - _taken(top, order)).exp() / _taken(total, order)
    upper = _taken(grad, order).to(dtype)
    to_logs = share * ((upper * outs).sum(-1) - _taken(own, order))
    return (upper * share[..., None]).to(outs.dtype), to_logs


def _but_itself(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.where(query == key, -5e4, score)  # ITSELF, which a graph might call a variable


def _seen(order: Tensor, chunks: Chunks) -> Any:
    """Which slots see which: those of their own chunk and the one before; padding is the last."""
    size, length, causal = chunks
    before_first = 1 - order.shape[-1] // size
    places = order.flatten(1, 2).to(torch.int32) if causal else None

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        behind = query // size - key // size
        found = (behind == 0) | (behind == 1) | (behind == before_first)
        found = found & (key < length)
        return found if places is None else found & (places[b, h, key] <= places[b, h, query])

    return mask_mod


def _meeting(order: Tensor, chunks: Chunks) -> "BlockMask":
    """The blocks of slots in which chunks meet."""
    slots, size = order.shape[-1], chunks.size
    count = slots // size

    def make() -> "BlockMask":
        lists = tuple((chunk, (chunk - 1) % count) for chunk in range(count))
        part = Part(size, size, lists, None)
        return lay(part, Sizes(slots, slots, False, False, 0), order.device).blocks

    if not untraced():
        return make()
    return _blocks.recall((slots, size), order.device, make, lambda made: are_short([made]))
