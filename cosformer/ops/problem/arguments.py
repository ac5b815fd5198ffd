"""From a caller's arguments to a `Problem`: positions, angles, decays, packing."""

import math

import torch
from torch import Tensor

from cosformer.check import (
    check_bool,
    check_choice,
    check_eps,
    check_key_mask,
    check_packing,
    check_place,
)
from cosformer.ops.problem.features import FEATURE_MAPS
from cosformer.ops.problem.problem import Problem
from cosformer.ops.state import Horizon, check_horizon, check_length

CONVENTIONS = ("index", "stretch")


def build(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    theta: Tensor,
    weight: str,
    feature_map: str,
    rule: str,
    eps: float,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
    positions: str = "index",
    position: Tensor | None = None,
) -> Problem:
    """`theta` is `[h, 1]` or, packed, `[1, T]`; `position` is where a stream stands."""
    queries, keys = q.shape[2], k.shape[2]
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    check_choice("positions", positions, CONVENTIONS)
    check_eps(eps)
    check_key_mask(key_mask, k)
    if query_start is None:
        query_start = keys - queries if causal else 0
    index = torch.arange(queries, dtype=torch.float64, device=q.device)
    query_position = (index + query_start)[None]
    key_position = torch.arange(keys, dtype=torch.float64, device=q.device)[None]
    sequence = None
    if positions == "stretch":
        longest = _longer(queries, keys)
        query_position = query_position * (longest / max(queries, 1))
        key_position = key_position * (longest / max(keys, 1))
    if cu_seqlens is not None:
        sequence = sequence_of(cu_seqlens, queries)
        query_position = key_position = (index - cu_seqlens[sequence])[None]
    if position is not None:
        before = position.to(torch.float64).reshape(-1, 1)
        query_position, key_position = query_position + before, key_position + before
    return Problem(
        query_position,
        key_position,
        theta,
        weight,
        causal,
        query_start,
        feature_map,
        rule,
        eps,
        scale,
        key_mask=key_mask,
        sequence=sequence,
        bounds=cu_seqlens,
    )


def decaying(problem: Problem, along: Tensor) -> Problem:
    """The problem with one more decay: its L `[b, h, T]`, query i where key i stands."""
    total = along if problem.query_decay is None else problem.query_decay + along
    return problem._replace(query_decay=total, key_decay=total)


def decaying_evenly(problem: Problem, log_decay: Tensor) -> Problem:
    """The problem with a decay for all tokens alike, `[1, h, 1]` in float64."""
    queries, keys = problem.query_position, problem.key_position
    if queries.shape[1] == keys.shape[1] and problem.query_start == 0:
        return decaying(problem, log_decay.expand(-1, -1, keys.shape[1]).cumsum(-1))
    # one number per head, so L is a line
    at_queries, at_keys = (log_decay * (position[:, None] + 1) for position in (queries, keys))
    return problem._replace(query_decay=at_queries, key_decay=at_keys)


def check_placement(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    cu_seqlens: Tensor | None,
    query_start: int | None,
    positions: str = "index",
) -> None:
    """Arguments that say where tokens stand, and which of them exclude each other."""
    check_bool("causal", causal)
    if query_start is not None and (
        isinstance(query_start, bool) or not isinstance(query_start, int | torch.SymInt)
    ):
        raise TypeError(f"query_start must be an int, got {type(query_start).__name__}")
    check_place("query_start", query_start)
    if positions == "stretch":
        for name, given in (
            ("causal=True", causal),
            ("query_start", query_start is not None),
            ("cu_seqlens", cu_seqlens is not None),
        ):
            if given:
                raise ValueError(
                    f"positions='stretch' scales by the lengths: {name} has no meaning"
                )
    if cu_seqlens is not None:
        if query_start is not None:
            raise ValueError("query_start has no meaning with cu_seqlens: sequences start at 0")
        check_packing(cu_seqlens, q, k)


def cosine_angle(
    q: Tensor,
    k: Tensor,
    horizon: Horizon | None,
    *,
    weight: str,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
) -> Tensor:
    """θ = π / (2 · horizon) for a call without a state; refuses a length past the horizon."""
    queries, keys = q.shape[2], k.shape[2]
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
        if horizon is None:
            own = lengths[sequence_of(cu_seqlens, queries)]
            return (math.pi / 2) / own.to(torch.float64)[None]
        horizon = check_horizon(horizon, q.shape[1], k.shape[1])
        if weight == "cosine":
            most = lengths.max()
            check_length(most if torch.compiler.is_compiling() else int(most), horizon)
        return angle_of(horizon, q)
    longest = _longer(queries, keys)
    if horizon is None:
        horizon = _longer(longest, 1)
    else:
        horizon = check_horizon(horizon, q.shape[1], k.shape[1])
    if weight == "cosine" and query_start is not None:
        start, stop = min(query_start, 0), max(keys, query_start + queries)
        check_length(stop - start, horizon)
    elif weight == "cosine":  # queries end with the keys, or begin with them
        check_length(longest, horizon)
    return angle_of(horizon, q)


def angle_of(horizon: Horizon, q: Tensor) -> Tensor:
    """θ as `[1, 1]` or, one per query head, `[H, 1]`."""
    if isinstance(horizon, Tensor):
        return (math.pi / 2) / per_head(horizon, q)
    number = math.pi / (2 * horizon)
    return torch.full((1, 1), number, dtype=torch.float64, device=q.device)


def per_head(values: Tensor, q: Tensor) -> Tensor:
    """One value per head, or per key head, as float64 `[H, 1]` for the heads of q."""
    values = values.to(device=q.device, dtype=torch.float64)
    return values.repeat_interleave(q.shape[1] // values.shape[0])[:, None]


def sequence_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of the packed sequence that each token belongs to."""
    index = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(index, cu_seqlens[1:], right=True)


def _longer(one: int, other: int) -> int:
    """The larger length; a graph exported with both open must not learn which one it was."""
    if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt):
        return torch.sym_max(one, other)
    return max(one, other)
