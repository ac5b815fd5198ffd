"""One attention problem as every implementation receives it: checked, with no default left open."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTS = {"plain": 1, "cosine": 2, "raised_cosine": 3}  # name -> states it needs


class Problem(NamedTuple):
    """Weights w(i, j) = exp(L_i − L_j) · c(θ(i − j)) on features φ, and the rule that divides.

    c is 1, cos or (1 + cos 2·)/2; L is the log-decay summed up to and with a token.
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
    query_decay: Tensor | None = None  # L at the queries [b, h, T], causal only; float64
    key_decay: Tensor | None = None  # L at the keys [b, h, S]
    key_mask: Tensor | None = None  # [B, S], True = real
    sequence: Tensor | None = None  # [T], which packed sequence a token belongs to
    bounds: Tensor | None = None  # [sequences + 1], where each begins
    query_basis: Tensor | None = None  # ψ at the queries, where it is known already
    key_basis: Tensor | None = None


def basis(position: Tensor, theta: Tensor, weight: str, dtype: torch.dtype) -> Tensor:
    """ψ with c(θ(i − j)) = ψ(i)·ψ(j), `[b, h, T, R]`; angles are float64 throughout."""
    angle = theta * position[:, None]
    if weight == "plain":
        parts = [torch.ones_like(angle)]
    elif weight == "cosine":
        parts = [angle.cos(), angle.sin()]
    else:
        half = math.sqrt(0.5)
        doubled = 2 * angle
        parts = [torch.full_like(angle, half), half * doubled.cos(), half * doubled.sin()]
    return torch.stack(parts, -1).to(dtype)


def outputs(q: Tensor, v: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Room for what kernels give out: `[B, H, T, V]`, and row totals `[B, H, T]` if any."""
    same_width = q.shape[3] == v.shape[3]
    out = torch.empty_like(q) if same_width else q.new_empty(*q.shape[:3], v.shape[3])
    rows = 0 if rule == "none" else q.shape[2]
    return out, q.new_empty(*q.shape[:2], rows, dtype=torch.float32)
