"""Raised cosine weights (1 + cos 2θδ)/2 = cos²(θδ): half a plain problem and half a cosine one.

Both halves are of the size of Σ_j φ(q_i)·φ(k_j), which we call the mass of a row, and cancel where
all keys that a query sees are about a horizon away from it. What is left is then rounding, so a row
whose weights are below `FAINT` on average fades to zero:

    out_i = Σ_j w(i, j) s_ij v_j / max(Σ_j w(i, j) s_ij, eps, FAINT · Σ_j s_ij)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosformer.ops.problem import Problem, quotient, with_ones
from cosformer.runtime import compute_dtype


def raised(
    compute: Callable[..., tuple[Tensor, Tensor | None]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    state: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor | None]:
    """Output and state, from both halves by `compute`, which get float32 at least."""
    dtype = compute_dtype(q.dtype)
    q_, k_, values = q.to(dtype), k.to(dtype), with_ones(v.to(dtype), problem.rule)
    half: dict[str, Any] = {"rule": "none", "scale": 1.0, "query_basis": None, "key_basis": None}
    before: tuple[Tensor | None, Tensor | None] = (None, None)
    if state is not None:
        flat_state, wave_state = state.split([1, 2], 2)
        before = (flat_state, wave_state)
    plain = problem._replace(weight="plain", **half)
    cosine = problem._replace(weight="cosine", theta=2 * problem.theta, **half)
    flat, flat_after = compute(q_, k_, values, plain, before[0], impl=impl)
    wave, wave_after = compute(q_, k_, values, cosine, before[1], impl=impl)
    sums = (flat + wave) / 2
    after = None
    if flat_after is not None and wave_after is not None:
        after = torch.cat([flat_after, wave_after], 2)
    return quotient(sums, problem, flat[..., -1:]).to(q.dtype), after
