"""The rules for what a row of sums is divided by, and how the quotient passes gradients on."""

from collections.abc import Callable

import torch
from torch import Tensor

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
