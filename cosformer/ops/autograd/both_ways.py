"""A decay without causality, w(i, j) = exp(−|L_i − L_j|) · c(θ(i − j)): a causal sweep each way.

    Σ_j w(i, j) s_ij v_j  =  Σ_{j ≤ i} …  +  Σ_{j ≥ i} …  −  s_ii v_i

The second sum is causal on the sequence turned round. Both hold the pair (i, i), whose weight is
1, so one of them is taken away. This cancels nothing: each sum is rounded relative to the terms it
is made of, of which that pair is one. All three share one denominator.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cosformer.ops.problem import (
    FEATURE_MAPS,
    Given,
    for_each_query_head,
    quotient,
    with_ones,
    zero_masked,
)
from cosformer.runtime import compute_dtype


def both_ways(causal: Callable[[Given], Tensor], given: Given) -> Tensor:
    """Output `[B, H, T, V]`; `causal` computes each direction, in float32 at least."""
    options, dtype = given.options, compute_dtype(given.q.dtype)
    q, k, values = given.q.to(dtype), given.k.to(dtype), with_ones(given.v.to(dtype), options.rule)
    undivided = options._replace(causal=True, rule="none", scale=1.0)
    past = given._replace(q=q, k=k, v=values, options=undivided)
    sums = causal(past) + causal(_turned(past)).flip(2) - _own(past)
    return quotient(sums, options).to(given.q.dtype)


def _turned(given: Given) -> Given:
    """The problem on the sequence turned round, from its end."""
    assert given.decay is not None
    about, decay = given.constants, given.decay
    ends = (decay[..., :1] + decay[..., -1:]).detach()  # so that L begins as it did
    found: dict[str, Any] = {}
    if about.key_mask is not None:
        found["key_mask"] = about.key_mask.flip(1)
    if about.sequence is not None and about.bounds is not None:  # which start again at 0
        found["bounds"] = about.bounds[-1] - about.bounds.flip(0)
        found["sequence"] = about.sequence[-1:] - about.sequence.flip(0)
        found["query_basis"] = about.query_basis.flip(2)
        found["key_basis"] = about.key_basis.flip(2)
    return given._replace(
        q=given.q.flip(2),
        k=given.k.flip(2),
        v=given.v.flip(2),
        decay=ends - decay.flip(2),
        constants=about._replace(**found),
    )


def _own(given: Given) -> Tensor:
    """What each query gets from the key at its own position."""
    phi = FEATURE_MAPS[given.options.feature_map].forward
    groups = given.q.shape[1] // given.k.shape[1]
    k, values = (  # φ at NaN, and its slope, would be NaN
        for_each_query_head(zero_masked(x, given.constants.key_mask), groups)
        for x in (given.k, given.v)
    )
    return (phi(given.q) * phi(k)).sum(-1, keepdim=True) * values
