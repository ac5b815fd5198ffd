"""From checked arguments to a `Problem`, which is kept for the next call where it can be."""

from torch import Tensor

from cosformer.check import check_choice, check_eps
from cosformer.memo import Memo
from cosformer.ops.problem.features import FEATURE_MAPS
from cosformer.ops.problem.placement import Packed, Placement, positions_of
from cosformer.ops.problem.problem import Problem, with_basis
from cosformer.runtime import compute_dtype

LONGEST = 1 << 16  # positions: above it a call takes longer than making them


def _is_short(problem: Problem) -> bool:
    return max(problem.query_position.numel(), problem.key_position.numel()) <= LONGEST


PROBLEMS: Memo[Problem] = Memo(_is_short)
"""Problems that follow from lengths, numbers and names alone."""


def build(
    q: Tensor,
    k: Tensor,
    placement: Placement,
    theta: Tensor,
    packed: Packed | None = None,
    *,
    weight: str,
    feature_map: str,
    rule: str,
    eps: float,
    scale: float = 1.0,
) -> Problem:
    """A problem without decay and mask; `theta` is `[h, 1]` or, packed, `[1, T]`.

    `packed`: where the tokens of packed sequences stand, if it is known already.
    """
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    check_eps(eps, compute_dtype(q.dtype))
    psi = None
    if packed is None:
        at_queries, at_keys, start, sequence = positions_of(q, k, placement)
        bounds = placement.cu_seqlens
    else:
        at_queries = at_keys = packed.position
        start, sequence, bounds, psi = 0, packed.sequence, packed.bounds, packed.basis
    problem = Problem(
        at_queries, at_keys, theta, weight, placement.causal, start, feature_map, rule, eps, scale,
        sequence=sequence, bounds=bounds, query_basis=psi, key_basis=psi,
    )  # fmt: skip
    return problem if packed else with_basis(problem, compute_dtype(q.dtype))
