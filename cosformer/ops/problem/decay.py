"""L, the logarithm of the decay summed up to and with each token: from gates, and its gradient."""

import torch
from torch import Tensor

GATE_RULE = "log_decay must be at most 0"


def least_gate(dtype: torch.dtype) -> float:
    """The smallest logarithm of a decay that is summed.

    The exponential of a smaller one is 0 as well, and the running sum would lose its last digits.
    """
    return -800.0 if dtype == torch.float64 else -110.0


def running_sum(gates: Tensor, least: float) -> Tensor:
    """Σ_{s ≤ t} max(g_s, least) over the last dimension, in float64; NaN stays NaN."""
    return gates.double().clamp(min=least).cumsum(-1)


def total_gate(gates: Tensor, dtype: torch.dtype) -> Tensor:
    """The last of the running sums over `[B, H, T]`: `[B, H]`, 0 where there is no token."""
    return gates.double().clamp(min=least_gate(dtype)).sum(-1)


def decay_gradient(
    by_query: Tensor,
    by_key: Tensor,
    at_end: Tensor | None,
    decay: Tensor,
    at_start: Tensor | None = None,
) -> Tensor:
    """The gradient dL of L: L_i is in row i of the weights, −L_j in column j, L_end in the state.

    Weights are linear in features, so the share of row i is φ(q_i)·dφ(q_i) and that of column j is
    φ(k_j)·dφ(k_j), which `by_query` and `by_key` hold, `[B, H, T, 1]`.

    Args:
        at_end: the last state times its gradient, element by element.
        at_start: what the sum over all tokens must be, `[B, H]`, where products are rounded to
            16 bits; in float32 and above there is nothing to gain.
    """
    by_query, by_key = by_query[..., 0], by_key[..., 0]
    if not by_key.shape[2]:
        return by_query.to(decay.dtype).sum_to_size(decay.shape)
    grad = by_query - by_key if by_query.shape[2] else -by_key
    if at_end is not None:
        last = grad[..., -1:] + at_end.sum((-3, -2, -1))[..., None]
        grad = torch.cat([grad[..., :-1], last], -1)
    if at_start is not None:
        grad = _balanced(grad, by_query, by_key, at_start)
    return grad.to(decay.dtype).sum_to_size(decay.shape)


def _balanced(grad: Tensor, by_query: Tensor, by_key: Tensor, total: Tensor) -> Tensor:
    """`grad` with the sum `total` over tokens; each token gives by its share of the variance.

    A gate's gradient sums dL from its token on, and with it all roundings of later tokens. But a
    shift of every L changes only what a state at the start weighs, so the sum over all is known.
    """
    size = torch.hypot(by_query, by_key)
    largest = size.amax(-1, keepdim=True).clamp(min=torch.finfo(grad.dtype).tiny)
    variance = (size / largest).square()
    excess = (grad.sum(-1) - total) / variance.sum(-1).clamp(min=1)  # the largest of them is 1
    return torch.addcmul(grad, variance, excess[..., None], value=-1)
