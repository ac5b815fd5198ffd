"""What the public functions demand of their tensors, said in one line each."""

from collections.abc import Collection
from itertools import pairwise

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes, dtypes and devices that fit; under autocast cast as PyTorch's own attention casts."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], got {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.shape[3] == 0:
            raise ValueError(f"{name} must have a width of at least 1, got {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q.shape[0]}, got {x.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the width of q, {q.shape[3]}, got {k.shape[3]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"v must have the heads and length of k, {list(k.shape[1:3])}, got {list(v.shape[1:3])}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"heads of q must be a multiple of the heads of k, got {q.shape[1]} and {k.shape[1]}"
        )
    return q, k, v


def check_choice(name: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value


def check_eps(eps: float) -> float:
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    return eps


def check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool (True = real token), got {key_mask.dtype}")
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"key_mask must be [batch, keys] = {[k.shape[0], k.shape[2]]}, "
            f"got {list(key_mask.shape)}"
        )
    if key_mask.device != k.device:
        raise ValueError(f"key_mask must be on the device of k, {k.device}, got {key_mask.device}")


def check_packing(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Boundaries 0 = s₀ ≤ s₁ ≤ … = T of sequences laid end to end in a batch of one."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a vector of int32 or int64, got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens must be on the device of q, {q.device}, got {cu_seqlens.device}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, got {q.shape[0]}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"cu_seqlens needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have at least 2 entries, got {cu_seqlens.shape[0]}")
    if torch.compiler.is_compiling():
        return  # the values are not known to a tracer
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != q.shape[2] or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must rise from 0 to the length {q.shape[2]}, got {ends}")
