"""Attention on projected features that nobody stores: the kernels for Hopper GPUs make them.

Forward reads q, k and v and writes the output, as cosFormer does. Backward makes the features once
more by the kernel of `projected.py`, and from there on is that of stored ones.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from cosformer.ops.apart import ones
from cosformer.ops.autograd.asked import Asked
from cosformer.ops.features.formula import formula_gradients
from cosformer.ops.features.projected import MAPS, as_multiplied, by_formula, by_kernel, gradients
from cosformer.ops.hopper import passes as hopper
from cosformer.ops.linear import linear_attention
from cosformer.runtime import eager, kernels_serve, on_device_of, recorded

WIDTH = 64
"""Of q and k, and rows of W; v may be narrower."""


def is_attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    kind: str,
    causal: bool,
) -> bool:
    """Whether these kernels make features of q and k by both W, and attend by them."""
    weights = (query_weight, key_weight)
    square = all(w.shape[-2:] == (WIDTH, WIDTH) for w in weights)
    known = False
    return square and known and are_projected(q, k, v, weights, causal)


def are_projected(
    q: Tensor, k: Tensor, v: Tensor, weights: tuple[Tensor, Tensor], causal: bool
) -> bool:
    """Whether these kernels take such rows, and W that lie there."""
    whole = not causal or q.shape[2] == k.shape[2]
    wide = q.shape[3] == WIDTH and v.shape[3] <= WIDTH
    there = all(w.device == q.device for w in weights)
    if not (whole and wide and there and kernels_serve(q)):
        return False
    plain = eager(q, k, v) and eager(q, *weights)
    return plain and hopper.unsupported(q, k, v, None, None, 1, causal) is None


def attend_projected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    key_mask: Tensor | None,
    kind: str,
    causal: bool,
    rule: str,
    eps: float,
) -> Tensor:
    """`linear_attention` on φ(q) and φ(k), `[B, H, T, V]`, where `is_attended`.

    Args:
        q, k, v: as there; masked keys are zeros.
        query_weight, key_weight: W, `[64, 64]` or one for each group of heads `[h, 64, 64]`.
        kind: φ, of `projected.MAPS`.
        rule: for D, or `none`.
    """
    options = (kind, causal, rule, eps)
    out: Tensor = _Attention.apply(q, k, v, query_weight, key_weight, key_mask, *options)
    return out


class _Attention(Function):
    """(q, k, v, W of q, W of k) -> out; derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        key_mask: Tensor | None,
        kind: str,
        causal: bool,
        rule: str,
        eps: float,
    ) -> Tensor:
        by_query, by_key = (as_multiplied(w, q) for w in (query_weight, key_weight))
        if by_query.dtype != by_key.dtype:
            by_query, by_key = by_query.float(), by_key.float()
        options = (causal, "identity", rule, eps, 1.0)
        with on_device_of(q):
            out, total, _, kept = hopper.forward(
                q, k, v, None, None, key_mask, None, None, *options, False,
                hopper.Projection(kind, MAPS[kind].parts * WIDTH, by_query, by_key),
            )  # fmt: skip
        ctx.kind, ctx.options = kind, options
        ctx.save_for_backward(q, k, v, query_weight, key_weight, key_mask, out, total, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, query_weight, key_weight, key_mask, out, total, kept = ctx.saved_tensors
        if recorded():
            inputs = (q, k, v, query_weight, key_weight)
            needs = ctx.needs_input_grad[:5]
            found = formula_gradients(_formula(ctx, key_mask), inputs, needs, grad)
            return *found, *[None] * 5
        features = by_kernel(q, query_weight, ctx.kind), by_kernel(k, key_weight, ctx.kind)
        of_q, of_k, of_v, *learned = ctx.needs_input_grad[:5]
        asked = Asked(of_q or learned[0], of_k or learned[1], of_v)
        with on_device_of(q):
            by_query, by_key, dv, *_ = hopper.backward(
                *features, v, None, None, key_mask, *ones(q, k), out, total, grad, None,
                *ctx.options, asked, kept,
            )  # fmt: skip
        del features
        dq, of_queries = _back(q, query_weight, by_query, ctx.kind, learned[0])
        del by_query
        dk, of_keys = _back(k, key_weight, by_key, ctx.kind, learned[1])
        return dq, dk, dv, of_queries, of_keys, *[None] * 5


def _back(
    x: Tensor, weight: Tensor, grad: Tensor | None, kind: str, learned: bool
) -> tuple[Tensor | None, Tensor | None]:
    """From features to x and, if it is learned, W."""
    if grad is None:
        return None, None
    dx, dweight, _ = gradients(x, weight, None, grad, kind, learned)
    return dx, dweight


def _formula(ctx: Any, key_mask: Tensor | None) -> Callable[..., Tensor]:
    causal, feature_map, rule, eps, _ = ctx.options
    about: dict[str, Any] = {"causal": causal, "feature_map": feature_map, "key_mask": key_mask}
    about |= {"normaliser": "none"} if rule == "none" else {"rule": rule, "eps": eps}

    def attend(q: Tensor, k: Tensor, v: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        features = by_formula(q, query_weight, ctx.kind), by_formula(k, key_weight, ctx.kind)
        return linear_attention(*features, v, **about, impl="chunked")

    return attend
