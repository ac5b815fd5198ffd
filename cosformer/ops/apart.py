"""Sums over groups of features and their totals, not divided yet, by the kernels for Hopper GPUs.

Totals come with the sums at no cost, as they do where a kernel divides; gradients of q and k are
written to their place among the features.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cosformer.ops.autograd.asked import Asked
from cosformer.ops.features.formula import formula_gradients
from cosformer.ops.hopper import passes as hopper
from cosformer.ops.linear import linear_attention
from cosformer.ops.problem.weights import log_gates
from cosformer.runtime import kernels_serve, on_device_of, recorded

RULE = ("apart", 0.0, 1.0)  # and eps and scale, as the kernels take them


def is_served(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: str,
    causal: bool,
    log_decay: Tensor | None = None,
) -> bool:
    """Whether these kernels take every group of features; a decay has no gradient here."""
    whole = not causal or q.shape[2] == k.shape[2]
    learned = log_decay is not None and log_decay.requires_grad
    if learned or not (whole and feature_map in hopper.MAPS and kernels_serve(q)):
        return False
    return all(
        hopper.unsupported(*each, v, log_decay, None, 1, causal) is None for each in _groups(q, k)
    )


def sums_apart(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    feature_map: str,
    causal: bool,
    log_decay: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Σ_j s(i, j) v_j `[B, H, T, V]` and Σ_j s(i, j) `[B, H, T, 1]` over each group of features.

    s(i, j) = φ(q_i)·φ(k_j), for j ≤ i where causal, times what `log_decay` leaves from j to i.
    """
    return parted(_Apart.apply(q, k, v, key_mask, feature_map, causal, log_decay))


def parted(found: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """All sums `[B, H, T, V]`, and all totals `[B, H, T, 1]`, which lie behind them."""
    count = len(found) // 2
    return list(found[:count]), [total[..., None] for total in found[count:]]


class _Apart(Function):
    """(q, k, v) -> all sums, then all totals; derivatives beyond the first go by torch."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        feature_map: str,
        causal: bool,
        log_decay: Tensor | None,
    ) -> tuple[Tensor, ...]:
        bases = ones(q, k)
        decay = None if log_decay is None else log_gates(log_decay, q, k)
        about = (decay, None, key_mask, *bases, causal, feature_map, *RULE, False)
        with on_device_of(q):
            found = [hopper.forward(*each, v, *about) for each in _groups(q, k)]
        sums, totals, _, kept = zip(*found, strict=True)
        ctx.feature_map, ctx.causal = feature_map, causal
        ctx.save_for_backward(q, k, v, key_mask, log_decay, decay, *bases, *kept)
        return *sums, *totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, log_decay, decay, *others = ctx.saved_tensors
        bases, kept = others[:2], others[2:]
        if recorded():
            needs = ctx.needs_input_grad[:3]
            formula = formula_of(ctx.feature_map, ctx.causal, key_mask, log_decay)
            return *formula_gradients(formula, (q, k, v), needs, grads), None, None, None, None
        asked = Asked(*ctx.needs_input_grad[:3])
        about, options = (decay, None, key_mask, *bases), (ctx.causal, ctx.feature_map)
        return *gradients_apart(q, k, v, about, options, grads, asked, kept), *[None] * 4


def gradients_apart(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    about: tuple[Tensor | None, ...],
    options: tuple[bool, str],
    grads: Sequence[Tensor],
    asked: Asked,
    kept: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of q, k and v by the gradients of all sums, then of all totals.

    Args:
        about: decay, state, mask and both ψ, as the kernels take them.
        options: causal, and the feature map.
        kept: by the forward pass, of each group.
    """
    dq, dk = (
        x.new_empty(x.shape) if needed else None for x, needed in ((q, asked.q), (k, asked.k))
    )
    dv: list[Any] = []  # of each group
    count = len(grads) // 2
    rooms = ([None] * count if x is None else _split(x) for x in (dq, dk))
    pieces = zip(
        _groups(q, k), zip(*rooms, strict=True), kept, grads[:count], grads[count:], strict=True
    )
    for each, into, states, grad, of_total in pieces:
        found = hopper.backward(
            *each, v, *about, grad, of_total.contiguous(), grad, None,
            *options, *RULE, asked, states, into,
        )  # fmt: skip
        dv.append(found[2])
    return dq, dk, sum(dv[1:], start=dv[0]) if asked.v else None


def formula_of(
    feature_map: str, causal: bool, key_mask: Tensor | None, log_decay: Tensor | None = None
) -> Callable[..., list[Tensor]]:
    """All sums, then all totals, of q, k and v by torch."""
    options: dict[str, Any] = {
        "feature_map": feature_map, "causal": causal, "key_mask": key_mask,
        "log_decay": log_decay, "normaliser": "none", "impl": "chunked",
    }  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        sums = [linear_attention(*each, values, **options) for each in _groups(q, k)]
        return [x[..., :-1] for x in sums] + [x[..., -1].float() for x in sums]

    return attend


def ones(q: Tensor, k: Tensor) -> list[Tensor]:
    """ψ at the queries and at the keys."""
    return [x.new_ones(1, 1, x.shape[2], 1, dtype=torch.float32) for x in (q, k)]


def _groups(q: Tensor, k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(_split(q), _split(k), strict=True)


def _split(x: Tensor) -> tuple[Tensor, ...]:
    """Into groups as wide as the kernels take."""
    return x.split(hopper.MAX_WIDTH, -1)
