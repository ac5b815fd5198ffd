"""One token of a stream: constant time, constant memory, the state changed where it stands."""

import torch
from torch import Tensor

from cosformer.ops.build import angle_of
from cosformer.ops.check import check_eps, check_inputs
from cosformer.ops.problem import basis, full_precision
from cosformer.ops.state import State, check_continues, check_length


def step(q: Tensor, k: Tensor, v: Tensor, state: State, *, eps: float = 1e-6) -> Tensor:
    """Attention of one new token, at a cost that does not grow; `state` is updated in place.

    Args:
        q: `[B, H, 1, D]` (or `[B, H, D]`); k and v likewise, with the heads of the state.
        state: from `State.empty` or `attention_with_state`. Its tensors are changed.

    Returns:
        `[B, H, 1, V]` (or `[B, H, V]`). For inference: gradients go through `attention_with_state`.

    >>> state = State.empty(1, 8, 64, 64, horizon=4096)
    >>> q, k, v = torch.randn(3, 1, 8, 1, 64)
    >>> step(q, k, v, state).shape, int(state.position)
    (torch.Size([1, 8, 1, 64]), 1)
    """
    if all(isinstance(x, Tensor) and x.dim() == 3 for x in (q, k, v)):
        return step(q[:, :, None], k[:, :, None], v[:, :, None], state, eps=eps)[:, :, 0]
    q, k, v = check_inputs(q, k, v)
    if q.shape[2] != 1 or k.shape[2] != 1:
        raise ValueError(f"step takes one token, got {q.shape[2]} queries and {k.shape[2]} keys")
    horizon = check_continues(state, k, v, None, None)
    check_eps(eps)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, state.key_value)):
        raise ValueError(
            "step records no gradients: use attention_with_state, or torch.no_grad() around it"
        )
    if state.weight == "cosine":
        check_length(1, horizon, state.position)
    dtype = state.key_value.dtype
    batch, heads, *_, value_width = state.key_value.shape
    position = state.position.to(torch.float64).reshape(-1, 1)
    psi = basis(position, angle_of(horizon, k), state.weight, dtype)  # [b, h, 1, R]
    keys = psi.mT * k.to(dtype).relu()  # [B, H, R, D]
    queries = q.to(dtype).relu().unflatten(1, (heads, -1))[:, :, :, 0]  # [B, H, groups, D]
    queries = (queries[:, :, :, None] * psi[:, :, :, :, None]).flatten(3)  # [B, H, groups, R·D]
    state.key_sum.add_(keys)
    state.key_value.addcmul_(keys[..., None], v.to(dtype)[:, :, :, None])
    state.position.add_(1)
    with full_precision(q):
        total = (queries @ state.key_sum.flatten(2)[..., None]).clamp(min=eps)
        out = queries @ state.key_value.flatten(2, 3) / total  # [B, H, groups, V]
    return out.reshape(batch, -1, 1, value_width).to(q.dtype)
