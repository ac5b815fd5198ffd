"""What a row of sums is divided by, and how the quotient passes gradients on."""

import torch
from torch import Tensor

SUM_RULES = ("clamp", "add", "signed")  # beside them a problem's rule may be "none"


def denominator(total: Tensor, rule: str, eps: float) -> Tensor:
    """max(total, eps), total + eps, or the total moved away from 0 to ±eps."""
    if rule == "clamp":
        return total.clamp(min=eps)
    if rule == "add":
        return total + eps
    return torch.where(total < 0, total.clamp(max=-eps), total.clamp(min=eps))


def slope(total: Tensor, rule: str, eps: float) -> Tensor:
    """d denominator / d total: 0 where eps took over."""
    if rule == "clamp":
        return (total > eps).to(total.dtype)
    if rule == "add":
        return torch.ones_like(total)
    return (total.abs() > eps).to(total.dtype)
