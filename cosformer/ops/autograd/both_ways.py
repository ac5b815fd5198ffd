"""A decay without causality, w(i, j) = exp(−|L_i − L_j|) · c(θ(i − j)): a causal sweep each way.

    Σ_j w(i, j) s_ij v_j  =  Σ_{j ≤ i} …  +  Σ_{j ≥ i} …  −  s_ii v_i

The second sum is causal on the sequence turned round. Both hold the pair (i, i), whose weight is
1, so one of them is taken away. This cancels nothing: each sum is rounded relative to the terms it
is made of, of which that pair is one. All three share one denominator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.problem import DENOMINATORS, FEATURE_MAPS, Given, for_each_query_head
from cosformer.runtime import compute_dtype


def goes_both_ways(given: Given) -> bool:
    """Whether queries see later keys under a decay."""
    some = given.q.shape[2] and given.k.shape[2]
    return bool(given.decay is not None and not given.options.causal and some)


def both_ways(causal: Callable[[Given], Tensor], given: Given) -> Tensor:
    """Output `[B, H, T, V]`; `causal` computes each direction, in float32 at least."""
    options, dtype = given.options, compute_dtype(given.q.dtype)
    q, k, values = (x.to(dtype) for x in (given.q, given.k, given.v))
    divides = options.rule != "none"
    if divides:
        values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    undivided = options._replace(causal=True, rule="none", scale=1.0)
    past = given._replace(q=q, k=k, v=values, options=undivided)
    sums = causal(past) + causal(_turned(past)).flip(2) - _own(past)
    if not divides:
        return (sums * options.scale).to(given.q.dtype)
    divisor = DENOMINATORS[options.rule](sums[..., -1:], options.eps)
    return (sums[..., :-1] / divisor).to(given.q.dtype)


def _turned(given: Given) -> Given:
    """The same of the sequence from its end."""
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
    q, k, values, groups = given.q, given.k, given.v, given.q.shape[1] // given.k.shape[1]
    phi, key_mask = FEATURE_MAPS[given.options.feature_map].forward, given.constants.key_mask
    if key_mask is not None:  # φ at NaN, and its slope, would be NaN
        hidden = ~key_mask[:, None, :, None]
        k, values = k.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    k, values = (for_each_query_head(x, groups) for x in (k, values))
    return (phi(q) * phi(k)).sum(-1, keepdim=True) * values
