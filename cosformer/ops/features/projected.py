"""Features of projections: φ(x) = f(W x)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.check import check_choice
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
    check_choice("kind", kind, PARTS)
    wide = x.to(compute_dtype(x.dtype))
    weight = weight.to(wide.dtype)
    if kind == "exp":
        exponent = _exponents(wide, weight)
        top = exponent.detach().amax(-1, keepdim=True) if level is None else level[..., None]
        features = (exponent - top).exp()
    elif kind == "softmaxes":
        turned = _product(wide, weight)
        return torch.cat([turned.softmax(-1), (-turned).softmax(-1)], -1).to(x.dtype)
    else:
        turned = _product(F.normalize(wide, dim=-1), weight)
        features = turned.relu() if kind == "relu" else torch.cat([turned.sin(), turned.cos()], -1)
    dtype = torch.float32 if kind == "exp" and x.dtype == torch.float16 else x.dtype
    return (features / weight.shape[-2] ** 0.5).to(dtype)


@torch.no_grad()
def top_exponents(x: Tensor, weight: Tensor) -> Tensor:
    """The largest exponent of `exp` of every token, `[B, H, T]`, without a gradient."""
    wide = x.to(compute_dtype(x.dtype))
    return _exponents(wide, weight.to(wide.dtype)).amax(-1)


def _exponents(x: Tensor, weight: Tensor) -> Tensor:
    """Wx − ‖x‖²/2 of x ← x/D^¼."""
    x = x / x.shape[-1] ** 0.25
    return _product(x, weight) - x.square().sum(-1, keepdim=True) / 2


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 3 and weight.shape[0] != x.shape[1]:
        weight = weight.repeat_interleave(x.shape[1] // weight.shape[0], 0)
    return x @ weight.mT
