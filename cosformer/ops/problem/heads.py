"""Grouped heads: several query heads share one key head, and its state."""

import torch
from torch import Tensor


def per_head_shapes(heads: int, key_heads: int) -> str:
    """The shapes that one number per head, or per key head, may have, for an error."""
    return " or ".join(f"[{size}]" for size in sorted({heads, key_heads}))


def for_each_query_head(x: Tensor, groups: int) -> Tensor:
    """`[B, H_kv, …]` as `[B, H, …]`."""
    if groups == 1:
        return x
    if torch.compiler.is_exporting():  # repeat_interleave puts a condition on an open length
        return x.index_select(1, torch.arange(x.shape[1] * groups, device=x.device) // groups)
    return x.repeat_interleave(groups, 1)


def summed_over_groups(grad: Tensor, groups: int) -> Tensor:
    """The gradient of `for_each_query_head`."""
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(2)


def of_first_in_group(x: Tensor, groups: int) -> Tensor:
    """`[B, H, …]` as `[B, H_kv, …]`, for tensors that are equal in all heads of a group."""
    return x if groups == 1 else x[:, ::groups]


def into_first_of_group(grad: Tensor, groups: int) -> Tensor:
    """The gradient of `of_first_in_group`: zeros for the other heads of each group."""
    if groups == 1:
        return grad
    others = torch.zeros_like(grad)[:, :, None].expand(-1, -1, groups - 1, *grad.shape[2:])
    return torch.cat([grad[:, :, None], others], 2).flatten(1, 2)


def per_head(values: Tensor | None) -> tuple[int, int]:
    """Strides of `[b, h, …]` for every sequence and head, 0 where they share."""
    if values is None:
        return 0, 0
    batch, head = (values.stride(i) if values.shape[i] > 1 else 0 for i in (0, 1))
    return batch, head
