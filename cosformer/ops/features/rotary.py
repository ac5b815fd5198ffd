"""Rotary positions ("RoFormer", Su et al., 2021), and features under them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.runtime import compute_dtype


def positions(start: int | Tensor, length: int, like: Tensor) -> Tensor:
    """`[b, T]` float64: positions of tokens from `start` on, a number or one for each stream."""
    index = torch.arange(length, dtype=torch.float64, device=like.device)[None]
    return index + (start.to(like.device).reshape(-1, 1) if isinstance(start, Tensor) else start)


def rotate(x: Tensor, position: Tensor, base: float = 1e4) -> Tensor:
    """Each pair (x_2n, x_2n+1) turned by position · base^(−2n/width); x `[B, H, T, D]`.

    Args:
        position: `[b, T]`, b is 1 or B.
    """
    pairs = torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device)
    angle = position.double()[:, None, :, None] * base ** (-pairs / x.shape[-1])  # [b, 1, T, D/2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    turn = _turn_traced if torch.compiler.is_compiling() else _turn
    return turn(x.to(dtype), cos, sin).to(x.dtype)


def rotated_features(x: Tensor, start: int | Tensor, base: float) -> Tensor:
    """1 + elu of x `[B, H, T, D]`, turned by the positions from `start` on."""
    features = F.elu(x.to(compute_dtype(x.dtype))).add_(1).to(x.dtype)
    return rotate(features, positions(start, x.shape[2], x), base)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation by complex numbers, one product each; they begin at even places in memory."""
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % 2 else x
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def _turn_traced(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation by real numbers, which compilers know; four times as slow without one."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
