"""Whom the op is measured against: softmax attention of PyTorch, linear attention of fla."""

import functools
import importlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def softmax(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Softmax attention by whatever backend PyTorch picks."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def softmax_by(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, backend: SDPBackend) -> Tensor:
    """Softmax attention by one backend, which may refuse."""
    with sdpa_kernel(backend):
        return softmax(q, k, v, causal=causal)


def fla_cosine(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """cosFormer as a user of flash-linear-attention can have it: features, then their kernels."""
    table = cosine_table(q.shape[2], q.device)
    make = _compiled_features()
    queries, keys = (make(x.transpose(1, 2), table) for x in (q, k))
    return _fla("chunk_linear_attn", queries, keys, v.transpose(1, 2), normalize=True)


def fla_linear(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, function: str) -> Tensor:
    """Linear attention of flash-linear-attention without cosine and denominator."""
    return _fla(function, *(x.transpose(1, 2) for x in (q, k, v)), normalize=False)


def features(x: Tensor, table: Tensor) -> Tensor:
    """`[relu(x)·cos, relu(x)·sin]`, rounded once: `[B, T, H, D]` -> `[B, T, H, 2D]`."""
    cos, sin = table
    positive = x.relu()
    return torch.cat([positive * cos, positive * sin], -1).to(x.dtype)


@functools.lru_cache(maxsize=2)
def cosine_table(length: int, device: torch.device) -> Tensor:
    """Cosine and sine of the angles at a horizon of `length`: `[2, T, 1, 1]`."""
    angle = math.pi / 2 / length * torch.arange(length, dtype=torch.float64, device=device)
    return torch.stack([angle.cos(), angle.sin()]).float()[:, :, None, None]


def _fla(function: str, q: Tensor, k: Tensor, v: Tensor, *, normalize: bool) -> Tensor:
    """A function of fla on its own layout `[B, T, H, D]`; ours `[B, H, T, D]` comes back."""
    attend = getattr(importlib.import_module("fla.ops.linear_attn"), function)
    out: Tensor = attend(q, k, v, scale=1.0, normalize=normalize)[0]
    return out.transpose(1, 2)


@functools.cache
def _compiled_features() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(features, dynamic=True)
