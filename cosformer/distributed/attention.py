"""Attention over sequences of which every rank has a stretch (context parallelism)."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

import cosformer.ops as ops
from cosformer.check import check_choice, check_inputs, check_key_mask, check_tensor
from cosformer.distributed.passes import Asked, Meanwhile, attend
from cosformer.distributed.stretch import Stretch, read_bounds, stretch_of
from cosformer.ops.problem import (
    Horizon,
    Rates,
    as_numbers,
    check_horizon,
    check_length,
    check_one_decay,
    kind_within,
    log_rates,
    quarter_turn_over,
    vanishes,
)

IMPLS = ("auto", "chunked", "triton")
"""`reference` needs a whole sequence, and `hopper` has no kernel that only sums keys to a state."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    horizon: Horizon | None = None,
    decay: Rates | None = None,
    log_decay: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weight: str = "cosine",
    eps: float = 1e-6,
    impl: str = "auto",
    lengths: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    meanwhile: Meanwhile | None = None,
) -> Tensor:
    """`cosformer.attention` of sequences of which every rank has a stretch.

    Rank 0 has the first tokens of every sequence, rank 1 those after them, and so on. The output is
    that of one process that has all tokens, cut in the same way. Every rank of the group must call
    it, with the same arguments but for q, k, v, log_decay and key_mask; and if one rank goes
    backward through the output, all must.

    Args:
        q, k, v: the tokens of this rank, `[B, H, T, D]`, `[B, H_kv, T, D]`, `[B, H_kv, T, V]`.
        causal: a query sees keys at its own position and before, on its own and on earlier ranks.
        horizon: as in `attention`, one number or one per key head `[H_kv]`; at least the length of
            the longest sequence on all ranks together. None: that length, or each packed
            sequence's own.
        decay: as in `attention`, one number or one per key head. The gradient of a tensor is this
            rank's share: sum it over the ranks.
        log_decay: log γ of the tokens of this rank, `[B, H_kv, T]`.
        key_mask: `[B, T]` bool, True = real token, for the tokens of this rank.
        cu_seqlens: boundaries of packed sequences among the tokens of all ranks, from 0 to their
            sum. A sequence may begin on one rank and end on another.
        weight, eps: as in `attention`.
        impl: `auto`, `chunked` or `triton`.
        lengths: how many tokens each rank has. None: all have as many as this one. Other numbers
            than those that the ranks have are an error.
        group: the ranks that share the sequences; None: all.
        meanwhile: a function that is called once, after this rank has begun to tell the others what
            they need and before it waits for them. What it computes costs no time while messages
            are on their way, and its gradients are computed while those of the backward pass are.
            A tensor that it returns takes the place of q, of which only shape, dtype and device
            are used then.

    Returns:
        `[B, H, T, V]` for the queries of this rank, in the dtype of q.
    """
    q, k, v = check_inputs(q, k, v)
    if decay is not None:
        decay = check_one_decay(decay, log_decay)
    kind_within(horizon, weight)
    stretch = _stretch(q, k, log_decay, key_mask, impl, lengths, group)
    bounds = read_bounds(cu_seqlens, q, stretch)
    longest = max(end - start for start, end in pairwise(bounds))
    if horizon is not None:
        horizon = check_horizon(horizon, q.shape[1], k.shape[1])
        if weight == "cosine" and not vanishes(decay, horizon):
            check_length(longest, horizon)
    ops.check_per_key_head(q, k, horizon=horizon, decay=decay)
    log_rates(decay, k, k, "decay")  # which checks them
    angle = quarter_turn_over(max(longest, 1) if horizon is None else horizon)
    given = ops.Arguments(
        "relu", causal, angle, 1.0 if decay is None else decay, log_decay,
        raised=weight == "raised_cosine", eps=eps, key_mask=key_mask, impl=impl,
    )  # fmt: skip
    alone = partial(
        ops.attention, causal=causal, horizon=horizon, decay=decay, weight=weight, eps=eps,
        impl=impl,
    )  # fmt: skip
    return attend(q, k, v, Asked(given, alone, horizon is None, meanwhile), stretch, bounds)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "identity",
    causal: bool = False,
    theta: float | Tensor = 0.0,
    gamma: Rates = 1.0,
    log_decay: Tensor | None = None,
    raised: bool = False,
    normaliser: str = "sum",
    rule: str = "clamp",
    eps: float = 1e-6,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
    lengths: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    meanwhile: Meanwhile | None = None,
) -> Tensor:
    """`cosformer.linear_attention` of sequences of which every rank has a stretch.

    Args:
        q, k, v, log_decay, key_mask, cu_seqlens, impl, lengths, group, meanwhile: as in
            `cosformer.distributed.attention`; a tensor that `meanwhile` returns has been through a
            feature_map that is a function.
        theta, gamma: one number or one per key head `[H_kv]`.
        others: as in `cosformer.linear_attention`.

    Returns:
        `[B, H, T, V]` for the queries of this rank, in the dtype of q.
    """
    gamma = as_numbers(gamma)
    given = ops.Arguments(
        feature_map, causal, theta, gamma, log_decay, raised, normaliser, rule, eps, scale,
        key_mask, impl=impl,
    )  # fmt: skip
    q, k, v, given = ops.mapped(q, k, v, given)
    ops.check_arguments(given)
    stretch = _stretch(q, k, log_decay, key_mask, impl, lengths, group)
    ops.check_per_key_head(q, k, theta=theta, gamma=gamma)
    alone = partial(
        ops.linear_attention, feature_map=given.feature_map, causal=causal, theta=theta,
        gamma=gamma, raised=raised, normaliser=normaliser, rule=rule, eps=eps, scale=scale,
        impl=impl,
    )  # fmt: skip
    bounds = read_bounds(cu_seqlens, q, stretch)
    return attend(q, k, v, Asked(given, alone, False, meanwhile), stretch, bounds)


def _stretch(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    impl: str,
    lengths: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> Stretch:
    """The stretch that these tokens are, once they are checked."""
    check_choice("impl", impl, IMPLS)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "a rank must have as many queries as keys: there is no cross attention over ranks, "
            f"got {q.shape[2]} and {k.shape[2]}"
        )
    check_key_mask(key_mask, k)
    if log_decay is not None:
        check_tensor("log_decay", log_decay)
        if log_decay.shape != k.shape[:3]:
            raise ValueError(
                "log_decay must be one per key head [batch, key heads, length] = "
                f"{list(k.shape[:3])}, got {list(log_decay.shape)}"
            )
    return stretch_of(q.shape[2], lengths, group)
