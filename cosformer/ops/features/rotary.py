"""Rotary positions ("RoFormer", Su et al., 2021), and features under them: by torch or a kernel."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from cosformer.ops.triton.tiles import TILE, padded
from cosformer.runtime import compute_dtype, kernels_serve, on_device_of, recorded

HEADS = 4
"""That share the angles of a block of tokens in the kernel."""


def positions(start: int | Tensor, length: int, like: Tensor) -> Tensor:
    """`[b, T]` float64: where tokens stand that begin at `start`, a number or one per stream."""
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
    """1 + elu of x `[B, H, T, D]`, turned as tokens stand; a GPU reads and writes once for it."""
    return (by_kernel if kernels_serve(x) else by_formula)(x, start, base)


def by_formula(x: Tensor, start: int | Tensor, base: float) -> Tensor:
    features = F.elu(x.to(compute_dtype(x.dtype))).add_(1).to(x.dtype)
    return rotate(features, positions(start, x.shape[2], x), base)


def by_kernel(x: Tensor, start: int | Tensor, base: float) -> Tensor:
    if not isinstance(start, Tensor):
        start = torch.full((1,), start, device=x.device)
    features: Tensor = _Rotated.apply(x, start.reshape(-1), base)
    return features


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs as complex numbers, which must begin at even places in memory: one product each."""
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % 2 else x
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def _turn_traced(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same by real numbers, four times as slow by itself: compilers know no complex ones."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class _Rotated(Function):
    """Derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor, base: float) -> Tensor:
        ctx.base = base
        ctx.save_for_backward(x, start)
        return _launch(x, None, start, base)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, start = ctx.saved_tensors
        if not recorded():
            return _launch(x, grad, start, ctx.base), None, None
        with torch.enable_grad():
            features = by_formula(x, start, ctx.base)
            found = torch.autograd.grad(features, x, grad, create_graph=True)
        return *found, None, None


def _launch(x: Tensor, grad: Tensor | None, start: Tensor, base: float) -> Tensor:
    from cosformer.ops.features.rotary_kernels import rotation_kernel

    if grad is not None and grad.stride(-1) != 1:
        grad = grad.contiguous()
    batch, heads, length, width = x.shape
    pairs = padded(width // 2, 1)
    tokens = max(1, TILE // (2 * pairs))
    blocks, groups = -(-length // tokens), -(-heads // HEADS)
    out = x.new_empty(x.shape)
    with on_device_of(x):
        rotation_kernel[(blocks * groups * batch,)](
            x, grad, start, out, blocks, groups, length, heads, int(start.numel() > 1),
            *x.stride(), *((0, 0, 0) if grad is None else grad.stride()[:3]),
            D=width, LOG_BASE=math.log2(base), HEADS=HEADS, BACK=grad is not None,
            ROUGH=x.dtype == torch.bfloat16, BLOCK_T=tokens, PAIRS=pairs,
        )  # fmt: skip
    return out
