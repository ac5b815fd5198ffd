"""A decay without causality: w(i, j) = γ^|i−j| · c(θ(i − j)), by one causal sweep each way.

    Σ_j w(i, j) s_ij v_j  =  Σ_{j ≤ i} …  +  Σ_{j ≥ i} …  −  s_ii v_i

The second sum is causal on the sequence turned round. Both hold the pair (i, i), whose weight is
1, so one of them is taken away. This cancels nothing: each sum is rounded relative to the terms it
is made of, of which that pair is one. All three share one denominator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.problem import DENOMINATORS, FEATURE_MAPS, Problem, for_each_query_head
from cosformer.runtime import compute_dtype


def both_ways(
    compute: Callable[..., tuple[Tensor, Tensor | None]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    impl: str,
) -> Tensor:
    """Output `[B, H, T, V]`; `compute` computes each direction, in float32 at least."""
    dtype = compute_dtype(q.dtype)
    q_, k_, values = (x.to(dtype) for x in (q, k, v))
    divides = problem.rule != "none"
    if divides:
        values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    past = problem._replace(causal=True, rule="none", scale=1.0)
    sums = compute(q_, k_, values, past, impl=impl)[0]
    turned = (x.flip(2) for x in (q_, k_, values))
    sums = sums + compute(*turned, _turned(past), impl=impl)[0].flip(2)
    sums = sums - _own(q_, k_, values, problem)
    if not divides:
        return (sums * problem.scale).to(q.dtype)
    divisor = DENOMINATORS[problem.rule](sums[..., -1:], problem.eps)
    return (sums[..., :-1] / divisor).to(q.dtype)


def _turned(problem: Problem) -> Problem:
    """The problem of the sequence from its end. Only distances matter, so positions may stay."""
    found: dict[str, Any] = {}
    if problem.key_mask is not None:
        found["key_mask"] = problem.key_mask.flip(1)
    if problem.gates is not None:
        # Between tokens i and i + 1 lies the gate of i + 1. The first one lies between no two.
        found["gates"] = problem.gates.flip(2).roll(1, 2)
    if problem.sequence is not None and problem.bounds is not None:
        found["bounds"] = problem.bounds[-1] - problem.bounds.flip(0)
        found["sequence"] = problem.sequence[-1:] - problem.sequence.flip(0)
        found["query_position"] = problem.query_position.flip(1)
        found["key_position"] = problem.key_position.flip(1)
        found |= {"query_basis": None, "key_basis": None}
        if problem.theta.shape[1] > 1:
            found["theta"] = problem.theta.flip(1)
    return problem._replace(**found)


def _own(q: Tensor, k: Tensor, values: Tensor, problem: Problem) -> Tensor:
    """What each query gets from the key at its own position."""
    phi, groups = FEATURE_MAPS[problem.feature_map].forward, q.shape[1] // k.shape[1]
    if problem.key_mask is not None:  # φ at NaN, and its slope, would be NaN
        hidden = ~problem.key_mask[:, None, :, None]
        k, values = k.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    k, values = (for_each_query_head(x, groups) for x in (k, values))
    return (phi(q) * phi(k)).sum(-1, keepdim=True) * values
