"""What theta, gamma and log_decay say of the weights: checked, and as tensors where q is."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cosformer.check import check_number, check_number_or_tensor, check_tensor, require_all
from cosformer.ops.autograd.gates import floor_of, running
from cosformer.ops.problem.arguments import per_head
from cosformer.ops.problem.memo import Numbers
from cosformer.ops.state import Horizon

Rates = float | Sequence[float] | Tensor
"""One number for all heads, or one for each."""


def kind_of(theta: float | Tensor, *, raised: bool) -> str:
    """A name of `WEIGHTS`."""
    if raised:
        return "raised_cosine"
    return "cosine" if isinstance(theta, Tensor) or theta else "plain"


def horizon_of(theta: float | Tensor) -> Horizon:
    """The distance at which the cosine is 0."""
    if isinstance(theta, Tensor):
        return (math.pi / 2) / theta.double()
    return math.pi / (2 * theta) if theta else math.inf


def angles(theta: float | Tensor, q: Tensor, k: Tensor) -> Tensor:
    """θ as `[1, 1]` or `[H, 1]`."""
    check_number_or_tensor("theta", theta)
    if isinstance(theta, Tensor):
        require_all(theta.isfinite(), "theta must be finite", theta)
    if isinstance(theta, Tensor) and theta.requires_grad and torch.is_grad_enabled():
        raise ValueError("theta must not require a gradient: none is computed for it")
    if not isinstance(theta, Tensor) and not abs(theta) < math.inf:
        raise ValueError(f"theta must be finite, got {theta}")
    return _for_heads("theta", theta, q, k)


def as_numbers(gamma: Rates) -> Rates:
    """A sequence as numbers that can be compared with those of another call."""
    if isinstance(gamma, Tensor):
        return gamma
    if not isinstance(gamma, Sequence) or isinstance(gamma, str | bytes):
        check_number("gamma", gamma, "a number, a sequence of them or a tensor")
        return gamma if torch.compiler.is_compiling() else float(gamma)
    for n, rate in enumerate(gamma):
        check_number(f"gamma[{n}]", rate)
    # tracers know no tuples of our own, and keep nothing
    return tuple(gamma) if torch.compiler.is_compiling() else Numbers(map(float, gamma))


def is_decaying(gamma: Rates, log_decay: Tensor | None) -> bool:
    """Whether weights fade at all."""
    return log_decay is not None or isinstance(gamma, Tensor) or gamma != 1


def sizes_of(values: Rates) -> list[int]:
    """`[]` for one number, `[H]` for one per head."""
    if isinstance(values, Sequence):
        return [len(values)]
    return list(values.shape) if isinstance(values, Tensor) else []


def log_rates(gamma: Rates, q: Tensor, k: Tensor) -> Tensor:
    """log γ, `[1, h, 1]`."""
    rule = "gamma must lie in (0, 1]"
    if isinstance(gamma, Tensor):
        check_number_or_tensor("gamma", gamma)
        require_all((gamma > 0) & (gamma <= 1), rule, gamma)
    elif not all(0 < rate <= 1 for rate in (gamma if isinstance(gamma, Sequence) else [gamma])):
        raise ValueError(f"{rule}, got {list(gamma) if isinstance(gamma, Sequence) else gamma}")
    if isinstance(gamma, Sequence):
        gamma = torch.tensor(gamma, dtype=torch.float64)
    return _for_heads("gamma", gamma, q, k).log()[None]


def log_gates(log_decay: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """L of a decay per token `[B, H, T]`, in float64."""
    batch, heads, queries = q.shape[:3]
    check_tensor("log_decay", log_decay)
    if not log_decay.dtype.is_floating_point:
        raise ValueError(f"log_decay must be real, got {log_decay.dtype}")
    if log_decay.device != q.device:
        raise ValueError(
            f"log_decay must be on the device of q, {q.device}, got {log_decay.device}"
        )
    if queries != k.shape[2]:
        raise ValueError(f"log_decay needs as many queries as keys, got {queries} and {k.shape[2]}")
    sizes = (batch, heads, queries), (batch, k.shape[1], queries)
    if log_decay.shape not in sizes:
        raise ValueError(
            f"log_decay must be [batch, heads, length] = {list(sizes[0])}, "
            f"got {list(log_decay.shape)}"
        )
    sums = running(log_decay, floor_of(q.dtype))
    groups = heads // log_decay.shape[1]
    return sums if groups == 1 else sums.repeat_interleave(groups, 1)


def _for_heads(name: str, values: float | Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A number, or one per head of q or of k, as float64 `[1, 1]` or `[H, 1]` where q is."""
    if not isinstance(values, Tensor):  # filled in on the device, which a graph can capture
        return torch.full((1, 1), values, dtype=torch.float64, device=q.device)
    if values.dim() == 0:
        return values.to(device=q.device, dtype=torch.float64).reshape(1, 1)
    # `in` finds no symbol of a graph
    if values.dim() != 1 or not any(values.shape[0] == x.shape[1] for x in (q, k)):
        raise ValueError(
            f"{name} must be a number or one per head [{q.shape[1]}], got {list(values.shape)}"
        )
    return per_head(values, q)
