"""Sums over Performer's features, which nobody stores: the kernels for Hopper GPUs make them.

Features come in groups as wide as a sweep takes, each with its own rows of W. Backward makes them
once more by the kernel of `projected.py`, and from there on is that of `apart.py`.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from cosformer.ops.apart import formula_of, gradients_apart, ones, parted
from cosformer.ops.attend_projected import WIDTH, are_projected
from cosformer.ops.autograd.asked import Asked
from cosformer.ops.features.formula import formula_gradients
from cosformer.ops.features.projected import (
    ALIGNED,
    as_multiplied,
    by_formula,
    by_kernel,
    gradients,
)
from cosformer.ops.hopper import passes as hopper
from cosformer.ops.problem.weights import log_gates
from cosformer.runtime import on_device_of, recorded

KIND = "exp"


def is_attended(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool) -> bool:
    """Whether these kernels make exponentials of q and k by one W, which is not learned."""
    shared = weight.dim() == 2 and weight.shape[1] == WIDTH and not weight.requires_grad
    return shared and are_projected(q, k, v, (weight, weight), causal)


def sums_of_exponentials(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    levels: tuple[Tensor, Tensor],
    key_mask: Tensor | None,
    causal: bool,
    log_decay: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """As `sums_apart` on φ(q) and φ(k), where `is_attended`.

    Args:
        q, k, v: as there; masked keys are zeros.
        weight: W, `[F, 64]`.
        levels: of queries `[B, H, T]` and of keys `[B, H, S]`; like `log_decay` no part of the
            graph.
    """
    return parted(_Exponentials.apply(q, k, v, weight, *levels, key_mask, causal, log_decay))


class _Exponentials(Function):
    """(q, k, v) -> all sums, then all totals; derivatives beyond the first go by torch."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        query_level: Tensor,
        key_level: Tensor,
        key_mask: Tensor | None,
        causal: bool,
        log_decay: Tensor | None,
    ) -> tuple[Tensor, ...]:
        levels = query_level.contiguous(), key_level.contiguous()
        gain = -0.5 * math.log2(weight.shape[0])
        decay = None if log_decay is None else log_gates(log_decay, q, k)
        about = (decay, None, key_mask, None, None, causal, "identity", "apart", 0.0, gain, False)
        with on_device_of(q):
            found = [
                hopper.forward(q, k, v, *about, _projection(rows, levels))
                for rows in as_multiplied(weight, q).split(hopper.MAX_WIDTH)
            ]
        sums, totals, _, kept = zip(*found, strict=True)
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, weight, *levels, key_mask, log_decay, decay, *kept)
        return *sums, *totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight, *levels, key_mask, log_decay, decay = ctx.saved_tensors[:9]
        if recorded():
            sums = formula_of("identity", ctx.causal, key_mask, log_decay)
            formula = _formula(weight, levels, sums)
            needs = ctx.needs_input_grad[:3]
            return *formula_gradients(formula, (q, k, v), needs, grads), *[None] * 6
        pairs = tuple(zip((q, k), levels, strict=True))
        queries, keys = (by_kernel(x, weight, KIND, level) for x, level in pairs)
        kept = [_padded(x) for x in ctx.saved_tensors[9:]]
        about, options = (decay, None, key_mask, *ones(q, k)), (ctx.causal, "identity")
        asked = Asked(*ctx.needs_input_grad[:3])
        with on_device_of(q):
            *by_row, dv = gradients_apart(queries, keys, v, about, options, grads, asked, kept)
        del queries, keys
        dq, dk = (
            None if grad is None else gradients(x, weight, level, grad, KIND, False)[0]
            for (x, level), grad in zip(pairs, by_row, strict=True)
        )
        return dq, dk, dv, *[None] * 6


def _projection(rows: Tensor, levels: tuple[Tensor, Tensor]) -> Any:
    return (KIND, rows.shape[0], rows, rows, levels)


def _padded(states: Tensor | None) -> Tensor | None:
    """States `[…, F, V+1]` of as many features as are stored, the last of them 0."""
    if states is None:
        return None
    missing = -states.shape[-2] % ALIGNED
    return F.pad(states, (0, 0, 0, missing)) if missing else states


def _formula(
    weight: Tensor, levels: list[Tensor], sums: Callable[..., list[Tensor]]
) -> Callable[..., list[Tensor]]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        pairs = zip((q, k), levels, strict=True)
        return sums(*(by_formula(x, weight, KIND, level) for x, level in pairs), v)

    return attend
