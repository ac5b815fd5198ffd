"""The rules for what a row of sums is divided by, and how the quotient passes gradients on."""

from collections.abc import Callable

import torch
from torch import Tensor

from cosformer.ops.problem.given import Options
from cosformer.ops.problem.problem import Problem

FAINT = 2.0**-12  # raised cosine weights that are smaller on average are rounding: `raised.py`

DENOMINATORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clamp": torch.clamp_min,
    "add": torch.add,
    "signed": lambda total, eps: torch.where(
        total < 0, total.clamp(max=-eps), total.clamp(min=eps)
    ),
}
"""rule -> max(total, eps), total + eps, or the total moved away from 0 to ±eps.

Beside these a problem's rule may be `none`: nothing is divided.
"""
FOLLOWS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clamp": torch.gt,
    "add": lambda total, eps: torch.ones_like(total, dtype=torch.bool),
    "signed": lambda total, eps: total.abs() > eps,
}
"""rule -> where the denominator follows the total: its slope there is 1, and 0 where eps holds."""


def with_ones(v: Tensor, rule: str) -> Tensor:
    """[v 1], whose last column sums the weights; v alone where nothing is divided."""
    return v if rule == "none" else torch.cat([v, torch.ones_like(v[..., :1])], -1)


def divisor(total: Tensor, rule: str, eps: float, mass: Tensor | None = None) -> Tensor:
    """What rows of sums are divided by; raised cosine weights need their mass Σ_j φ(q_i)·φ(k_j)."""
    found = DENOMINATORS[rule](total, eps)
    return found if mass is None else torch.maximum(found, FAINT * mass)


def quotient(sums: Tensor, about: Problem | Options, mass: Tensor | None = None) -> Tensor:
    """The output from the sums of `with_ones(v)`: divided, or else times the scale."""
    if about.rule == "none":
        return sums * about.scale
    return sums[..., :-1] / divisor(sums[..., -1:], about.rule, about.eps, mass)
