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


def build_packed(
    packed: Packed, causal: bool, *, weight: str, feature_map: str, rule: str, eps: float,
    scale: float = 1.0,
) -> Problem:  # fmt: skip
    """`build` of packed sequences whose positions and ψ are known."""
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    check_eps(eps)
    at, psi = packed.position, packed.basis
    return Problem(
        at, at, packed.theta, weight, causal, 0, feature_map, rule, eps, scale,
        sequence=packed.sequence, bounds=packed.bounds, query_basis=psi, key_basis=psi,
    )  # fmt: skip


def build(
    q: Tensor,
    k: Tensor,
    placement: Placement,
    *,
    theta: Tensor,
    weight: str,
    feature_map: str,
    rule: str,
    eps: float,
    scale: float = 1.0,
) -> Problem:
    """A problem without decay and mask; `theta` is `[h, 1]` or, packed, `[1, T]`."""
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    check_eps(eps)
    stand = positions_of(q, k, placement)
    problem = Problem(
        stand.query_position,
        stand.key_position,
        theta,
        weight,
        placement.causal,
        stand.query_start,
        feature_map,
        rule,
        eps,
        scale,
        sequence=stand.sequence,
        bounds=placement.cu_seqlens,
    )
    return with_basis(problem, compute_dtype(q.dtype))
