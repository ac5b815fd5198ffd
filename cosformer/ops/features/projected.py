"""Features of projections: φ(x) = f(W x)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.runtime import compute_dtype

PARTS = {"exp": 1, "waves": 2, "relu": 1, "softmaxes": 2}
"""The name of f -> how many features there are for every row of W."""


def projected(x: Tensor, weight: Tensor, kind: str, level: Tensor | None = None) -> Tensor:
    """φ(x) `[B, H, T, PARTS·F]` in the dtype of x; `exp` of float16 is float32, as it reaches far.

    | kind      | φ(x)                                                                   |
    |-----------|------------------------------------------------------------------------|
    | exp       | exp(Wx − ‖x‖²/2 − level)/√F, x ← x/D^¼; positive features of softmax   |
    | waves     | [sin Wx, cos Wx]/√F, x ← x/‖x‖                                         |
    | relu      | relu(Wx)/√F, x ← x/‖x‖                                                 |
    | softmaxes | [softmax(Wx), softmax(−Wx)]                                            |

    Args:
        x: `[B, H, T, D]`.
        weight: W, `[F, D]` or one for each group of heads `[h, F, D]`.
        kind: the name of f.
        level: `[B, H, T]`, without a gradient, for `exp` only; None is the largest exponent of
            each token.
    """
    wide = x.to(compute_dtype(x.dtype))
    weight = weight.to(wide.dtype)
    if kind == "exp":
        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        if level is None:
            exponents = _exponents(wide, weight)
            level = exponents.detach().amax(-1)
            shift = level + math.log(weight.shape[-2]) / 2
            return (exponents - shift[..., None]).exp().to(dtype)
        # 1/√F and the level go into the product's own addition: each pass over F·T numbers counts
        shift = level + math.log(weight.shape[-2]) / 2
        return _exponents(wide, weight, shift).exp().to(dtype)
    if kind == "softmaxes":
        turned = _product(wide, weight)
        return torch.cat([turned.softmax(-1), (-turned).softmax(-1)], -1).to(x.dtype)
    turned = _product(F.normalize(wide, dim=-1), weight)
    features = turned.relu() if kind == "relu" else torch.cat([turned.sin(), turned.cos()], -1)
    return (features / weight.shape[-2] ** 0.5).to(x.dtype)


@torch.no_grad()
def top_exponents(x: Tensor, weight: Tensor) -> Tensor:
    """The largest exponent of `exp` of every token, `[B, H, T]`, without a gradient."""
    wide = x.to(compute_dtype(x.dtype))
    return _exponents(wide, weight.to(wide.dtype)).amax(-1)


def _exponents(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
    """Wx − ‖x‖²/2 − shift of x ← x/D^¼; the shift is `[B, H, T]`."""
    x = x / x.shape[-1] ** 0.25
    less = x.square().sum(-1) / 2
    less = less if shift is None else less + shift
    each = _for_heads(weight, x).mT.expand(*x.shape[:2], -1, -1).flatten(0, 1)
    found = torch.baddbmm(-less.flatten(0, 1)[..., None], x.flatten(0, 1), each)
    return found.unflatten(0, x.shape[:2])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ _for_heads(weight, x).mT


def _for_heads(weight: Tensor, x: Tensor) -> Tensor:
    """W as one for all heads of x, or one for each."""
    if weight.dim() == 2 or weight.shape[0] == x.shape[1]:
        return weight
    return weight.repeat_interleave(x.shape[1] // weight.shape[0], 0)
