"""The formula as written: quadratic, and the measure of every other implementation."""

import torch
from torch import Tensor

from cosformer.ops.problem import (
    FEATURE_MAPS,
    Problem,
    basis,
    for_each_query_head,
    least_gate,
    quotient,
    running_sum,
    with_ones,
    zero_masked,
)
from cosformer.runtime import compute_dtype

ALL = slice(None)


def reference(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, T, V]`, and the state `[B, H, R, D, V(+1)]` after the keys if one came in."""
    dtype = compute_dtype(q.dtype)
    problem = with_summed_gates(problem, dtype)
    v = with_ones(_repeat_heads(v, q).to(dtype), problem.rule)
    v = zero_masked(v, problem.key_mask)
    sums = scores(q, k, problem) @ v
    before = state
    if state is not None:
        history, state = _continue(q, k, v, problem, state)
        sums = sums + history
    mass = None
    if problem.weight == "raised_cosine" and problem.rule != "none":
        mass = _mass(q, k, v[..., -1:], problem, before)
    return quotient(sums, problem, mass).to(q.dtype), state


def scores(
    q: Tensor, k: Tensor, problem: Problem, rows: slice = ALL, columns: slice = ALL
) -> Tensor:
    """s(i, j) = φ(q_i)·φ(k_j) w(i, j), not yet divided: `[B, H, T, S]` or a window of it."""
    queries, keys = _features(q, k, problem)
    weight = weights(problem, rows, columns).to(queries.dtype)
    return (queries[:, :, rows] @ keys[:, :, columns].mT) * weight


def weights(problem: Problem, rows: slice = ALL, columns: slice = ALL) -> Tensor:
    """w(i, j), zero for pairs that may not meet: `[b, h, T, S]` or a window of it, float64."""
    queries, keys = problem.query_position[:, rows], problem.key_position[:, columns]
    theta = problem.theta if problem.theta.shape[1] == 1 else problem.theta[:, rows]
    angle = theta[..., None] * (queries[:, None, :, None] - keys[:, None, None, :])
    if problem.weight == "plain":
        weight = torch.ones_like(angle)
    elif problem.weight == "cosine":
        weight = angle.cos()
    else:
        weight = angle.cos().square()
    i = torch.arange(problem.query_position.shape[1], device=angle.device)[rows, None]
    j = torch.arange(problem.key_position.shape[1], device=angle.device)[columns]
    seen = i + problem.query_start >= j
    allowed = seen if problem.causal else torch.ones_like(seen)
    if problem.sequence is not None:
        allowed = allowed & (problem.sequence[rows, None] == problem.sequence[columns])
    if problem.query_decay is not None and problem.key_decay is not None:
        difference = problem.query_decay[..., rows, None] - problem.key_decay[..., None, columns]
        difference = torch.where(seen, difference, -difference)  # the later token minus the earlier
        weight = weight * difference.masked_fill(~allowed, 0).exp()
    return weight.masked_fill(~allowed, 0)


def with_summed_gates(problem: Problem, dtype: torch.dtype) -> Problem:
    """The problem with the running sum of its gates as a part of L."""
    if problem.gates is None:
        return problem
    total = running_sum(problem.gates, least_gate(dtype))
    if problem.query_decay is not None:
        total = total + problem.query_decay
    return problem._replace(query_decay=total, key_decay=total, gates=None)


def _features(q: Tensor, k: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q.dtype)
    phi = FEATURE_MAPS[problem.feature_map].forward
    # Before φ, for NaN times the slope of φ is NaN; after it, for φ(0) need not be 0.
    keys = phi(zero_masked(_repeat_heads(k, q).to(dtype), problem.key_mask))
    return phi(q.to(dtype)), zero_masked(keys, problem.key_mask)


def _mass(q: Tensor, k: Tensor, ones: Tensor, problem: Problem, state: Tensor | None) -> Tensor:
    """Σ_j φ(q_i)·φ(k_j) over the keys that query i sees, decayed but without the raised cosine."""
    plain = problem._replace(weight="plain")
    mass = scores(q, k, plain) @ ones
    if state is not None:
        mass = mass + _continue(q, k, ones, plain, state[:, :, :1, :, -1:])[0]
    return mass


def _continue(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What the queries read from the state, and the state after these keys."""
    queries, keys = _features(q, k, problem)
    read = basis(problem.query_position, problem.theta, problem.weight, queries.dtype)
    write = basis(problem.key_position, problem.theta, problem.weight, queries.dtype)
    groups = q.shape[1] // state.shape[1]
    kept = history = for_each_query_head(state.to(queries.dtype), groups)
    if problem.query_decay is not None and k.shape[2]:
        decay = problem.query_decay  # the keys', too: a stream has as many queries as keys
        read = read * decay.exp()[..., None].to(read.dtype)
        write = write * (decay[..., -1:] - decay).exp()[..., None].to(read.dtype)
        kept = kept * decay[..., -1, None, None, None].exp().to(read.dtype)
    if problem.weight == "raised_cosine":
        read = read / 2
    seen = torch.einsum("bhtd,bhtr,bhrdv->bhtv", queries, read.expand(*q.shape[:3], -1), history)
    added = torch.einsum("bhsd,bhsr,bhsv->bhrdv", keys, write.expand(*keys.shape[:3], -1), v)
    return seen, (kept + added)[:, ::groups]


def _repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    return for_each_query_head(k, q.shape[1] // k.shape[1])
