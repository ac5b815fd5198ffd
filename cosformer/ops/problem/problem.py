"""One attention problem, whose arguments are checked and complete."""

from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTS = {"plain": 1, "cosine": 2, "raised_cosine": 3}
"""The kinds of weights, and how many states each needs."""


class Problem(NamedTuple):
    """Weights w(i, j) = exp(−|L_i − L_j|) · c(θ(i − j)) on features φ, and the rule that divides.

    c is 1, cos or (1 + cos 2·)/2. L is the logarithm of the decay, summed up to and with a token:
    that of a decay per head (`query_decay`, `key_decay`) plus the running sum of `gates`. It never
    rises, so a causal weight is exp(L_i − L_j).
    """

    query_position: Tensor  # [b, T] float64; b is 1 or the batch
    key_position: Tensor  # [b, S] float64
    theta: Tensor  # [h, 1], or [1, T] for packed sequences with horizons of their own; float64
    weight: str
    causal: bool
    query_start: int  # the key index that the first query stands at
    feature_map: str
    rule: str
    eps: float
    scale: float = 1.0  # of the output, where nothing is divided
    query_decay: Tensor | None = None  # L at the queries [1, h, T]; float64
    key_decay: Tensor | None = None  # L at the keys [1, h, S]
    mild: bool = False  # whether the decay per head is known to be at least ½
    gates: Tensor | None = None  # logarithms of a decay per token [B, h, T]; query i is at key i
    key_mask: Tensor | None = None  # [B, S], True = real
    sequence: Tensor | None = None  # [T], which packed sequence a token belongs to
    bounds: Tensor | None = None  # [sequences + 1], where each begins
    query_basis: Tensor | None = None  # ψ at the queries, where it is known already
    key_basis: Tensor | None = None

    @property
    def is_aligned(self) -> bool:
        """Whether query i stands at key i, and there are as many of both."""
        same = self.query_position.shape[1] == self.key_position.shape[1]
        return same and self.query_start == 0


def basis(position: Tensor, theta: Tensor, weight: str, dtype: torch.dtype) -> Tensor:
    """ψ, `[b, h, T, R]`; angles are float64 throughout.

    c(θ(i − j)) = ψ(i)·ψ(j) for plain and cosine weights. For raised cosine weights ψ has three
    functions, 1, cos 2θi and sin 2θi, and c is half of ψ(i)·ψ(j).
    """
    angle = theta * position[:, None]
    if weight == "plain":
        return torch.ones_like(angle, dtype=dtype)[..., None]
    if weight == "cosine":
        return torch.stack([angle.cos(), angle.sin()], -1).to(dtype)
    angle = 2 * angle
    return torch.stack([torch.ones_like(angle), angle.cos(), angle.sin()], -1).to(dtype)


def with_basis(problem: Problem, dtype: torch.dtype) -> Problem:
    """The problem with ψ at its queries and keys, one tensor where both stand alike."""
    turn = (problem.theta, problem.weight, dtype)
    at_queries = basis(problem.query_position, *turn)
    # dynamo takes no tensor twice, and a graph with two open lengths must not compare them
    shared = not torch.compiler.is_compiling() and problem.is_aligned
    at_keys = at_queries if shared else basis(problem.key_position, *turn)
    return problem._replace(query_basis=at_queries, key_basis=at_keys)


def zero_masked(rows: Tensor, key_mask: Tensor | None) -> Tensor:
    """Rows `[B, h, S, d]` with zeros at masked tokens, even where they hold NaN."""
    return rows if key_mask is None else rows.masked_fill(~key_mask[:, None, :, None], 0)
