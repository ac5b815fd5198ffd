"""Features of projections, φ(x) = f(W x̂): formulas in torch, and on a GPU one kernel each way.

By torch a map takes a dozen passes over float32 tensors of the features' width. The kernels read x
and write φ, or read x and dφ and write dx and dW, with everything between in registers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from cosformer.ops.features.formula import formula_gradients
from cosformer.ops.triton.tiles import padded
from cosformer.runtime import compute_dtype, kernels_serve, on_device_of, recorded

MAX_WIDTHS = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 64}
"""Of x, and of the rows of W that must lie in registers at once."""
ALIGNED = 8
"""Rows of features are padded to multiples of it: 16 bytes, which other kernels need."""
FEWEST = 64
"""Columns of a product: Triton 3.6 multiplies fewer wrongly."""
STEPS = 16
"""Blocks of 64 tokens that a program sums dW over."""


class Map(NamedTuple):
    """f of `[B, H, T, D]` and `[F, D]` or `[h, F, D]`, all in the dtype of sums."""

    formula: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    parts: int  # features for every row of W
    scaled: bool  # by 1/√F


def exponents(x: Tensor, weight: Tensor) -> Tensor:
    """Wx − ‖x‖²/2 of x ← x/D^¼."""
    x = x / x.shape[-1] ** 0.25
    return _product(x, weight) - x.square().sum(-1, keepdim=True) / 2


def _exp(x: Tensor, weight: Tensor, level: Tensor | None) -> Tensor:
    """Relative to a level for each token, or to a row's own largest exponent."""
    exponent = exponents(x, weight)
    top = exponent.detach().amax(-1, keepdim=True) if level is None else level[..., None]
    return (exponent - top).exp() / weight.shape[-2] ** 0.5


def _waves(x: Tensor, weight: Tensor, level: Tensor | None) -> Tensor:
    turned = _product(F.normalize(x, dim=-1), weight)
    return torch.cat([turned.sin(), turned.cos()], -1) / weight.shape[-2] ** 0.5


def _relu(x: Tensor, weight: Tensor, level: Tensor | None) -> Tensor:
    return _product(F.normalize(x, dim=-1), weight).relu() / weight.shape[-2] ** 0.5


def _softmaxes(x: Tensor, weight: Tensor, level: Tensor | None) -> Tensor:
    x = _product(x, weight)
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


MAPS = {
    "exp": Map(_exp, 1, True),
    "waves": Map(_waves, 2, True),
    "relu": Map(_relu, 1, True),
    "softmaxes": Map(_softmaxes, 2, False),
}


def projected(
    x: Tensor, weight: Tensor, kind: str, level: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    """φ(x) `[B, H, T, parts·F]`; where a kernel made it, zeros follow up to a multiple of 8.

    Args:
        x: `[B, H, T, D]`.
        weight: W, `[F, D]` or one for each group of heads `[h, F, D]`.
        level: `[B, H, T]`, no part of the graph; for `exp` only.
        share: `[B, H, T]`, a factor of a token's features.
    """
    if is_served(x, weight.shape[-2], kind):
        return by_kernel(x, weight, kind, level, share)
    return by_formula(x, weight, kind, level, share)


def by_formula(
    x: Tensor, weight: Tensor, kind: str, level: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    wide = x.to(compute_dtype(x.dtype))
    features = MAPS[kind].formula(wide, weight.to(wide.dtype), level)
    if share is not None:
        features = features * share[..., None].to(wide.dtype)
    return features.to(_dtype(x, kind))


def by_kernel(
    x: Tensor, weight: Tensor, kind: str, level: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    features: Tensor = _Projected.apply(x, weight, share, level, kind)
    return features


def top_exponents(x: Tensor, weight: Tensor) -> Tensor:
    """`[B, H, T]`: the largest of a token's exponents; no part of the graph."""
    x, weight = x.detach(), weight.detach()
    if is_served(x, weight.shape[-2], "exp"):
        level = x.new_empty(x.shape[:3], dtype=torch.float32)
        _launch(x, weight, level, None, "exp", own=True, write=False)
        return level
    wide = x.to(compute_dtype(x.dtype))
    return exponents(wide, weight.to(wide.dtype)).amax(-1)


def is_served(x: Tensor, rows: int, kind: str) -> bool:
    """Whether kernels make features of x by so many rows of W."""
    return kernels_serve(x) and fits(x, rows, kind)


def fits(x: Tensor, rows: int, kind: str) -> bool:
    """Whether kernels have room for them."""
    widest = MAX_WIDTHS.get(x.dtype, 0)
    return x.numel() > 0 and x.shape[-1] <= widest and _block(rows, kind) <= widest


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 3 and weight.shape[0] != x.shape[1]:
        weight = weight.repeat_interleave(x.shape[1] // weight.shape[0], 0)
    return x @ weight.mT


def _dtype(x: Tensor, kind: str) -> torch.dtype:
    """That of x; but float16 does not reach as far as exponentials."""
    return torch.float32 if kind == "exp" and x.dtype == torch.float16 else x.dtype


class _Projected(Function):
    """(x, weight, share) -> φ(x); derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        share: Tensor | None,
        level: Tensor | None,
        kind: str,
    ) -> Tensor:
        ctx.kind, ctx.own = kind, kind == "exp" and level is None
        if ctx.own:
            level = x.new_empty(x.shape[:3], dtype=torch.float32)
        features = _launch(x, weight, level, share, kind, own=ctx.own, write=True)
        ctx.save_for_backward(x, weight, share, level)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, share, level = ctx.saved_tensors
        _, learned, of_share, *_ = ctx.needs_input_grad
        many = ctx.kind == "exp" and learned  # the kernel sums dW of one block only
        if not (recorded() or many):
            given = (x, weight, level, grad, ctx.kind, learned, share, of_share)
            return *gradients(*given), None, None

        def features(x: Tensor, weight: Tensor, share: Tensor | None = None) -> Tensor:
            return by_formula(x, weight, ctx.kind, None if ctx.own else level, share)

        wide = MAPS[ctx.kind].parts * weight.shape[-2]  # zeros may follow
        inputs = (x, weight) if share is None else (x, weight, share)
        needs = ctx.needs_input_grad[: len(inputs)]
        found = formula_gradients(features, inputs, needs, grad[..., :wide])
        return *found, *[None] * (5 - len(found))


def _launch(
    x: Tensor,
    weight: Tensor,
    level: Tensor | None,
    share: Tensor | None,
    kind: str,
    *,
    own: bool,
    write: bool,
) -> Tensor:
    """Features, or an empty tensor; a row's own level is stored."""
    from cosformer.ops.features.projected_kernels import features_kernel

    rows, parts = weight.shape[-2], MAPS[kind].parts
    columns = (parts - 1) * rows + _last(rows, kind)
    out = x.new_empty(*x.shape[:3], columns if write else 0, dtype=_dtype(x, kind))
    options = _options(x, rows, kind)
    tokens = 64 if _block(rows, kind) > 64 or kind == "softmaxes" else 128
    if kind in ("waves", "relu"):
        options["num_warps"] = 8
    blocks = -(-x.shape[2] // tokens)
    with on_device_of(x):
        features_kernel[(blocks * x.shape[0] * x.shape[1],)](
            x, *halves(weight, x), level, share, out, blocks, *_sizes(x, weight, kind),
            *x.stride(), *_strides(level), *_strides(share),
            P=columns, PARTS=parts, OWN=own, WRITE=write, BLOCK_T=tokens, **options,
        )  # fmt: skip
    return out


def gradients(
    x: Tensor,
    weight: Tensor,
    level: Tensor | None,
    grad: Tensor,
    kind: str,
    learned: bool,
    share: Tensor | None = None,
    of_share: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of x, of W if it is `learned`, and of the share if it is asked for."""
    from cosformer.ops.features.projected_kernels import gradients_kernel

    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    steps = min(STEPS, -(-x.shape[2] // 64)) if learned else 1
    blocks = -(-x.shape[2] // (64 * steps))
    heads, (rows, width) = x.shape[0] * x.shape[1], weight.shape[-2:]
    options = _options(x, rows, kind)
    if kind == "exp" and x.dtype == torch.bfloat16 and width <= FEWEST:
        options["num_stages"] = 3  # there are many blocks of W, and room for the next two
    dx = x.new_empty(x.shape)
    dshare = share.new_empty(share.shape) if share is not None and of_share else None
    parts = x.new_empty(heads * blocks if learned else 0, rows, width, dtype=torch.float32)
    with on_device_of(x):
        gradients_kernel[(blocks * heads,)](
            x, *halves(weight, x), level, share, grad, dx, parts, dshare, blocks,
            *_sizes(x, weight, kind, steps), *x.stride(), *_strides(level), *_strides(share),
            *grad.stride()[:3],
            SPLIT=x.dtype == torch.bfloat16, LEARNED=learned, BLOCK_T=64, **options,
        )  # fmt: skip
    if not learned:
        return dx, None, dshare
    count = weight.shape[0] if weight.dim() == 3 else 1
    parts = parts.view(x.shape[0], count, -1, rows, width).sum((0, 2))
    return dx, parts.view(weight.shape).to(weight.dtype), dshare


def _sizes(x: Tensor, weight: Tensor, kind: str, *steps: int) -> tuple[float, ...]:
    """length, heads, heads that share a W, (steps,) scale of x, gain of φ"""
    heads, (rows, width) = x.shape[1], weight.shape[-2:]
    shared = heads // (weight.shape[0] if weight.dim() == 3 else 1)
    scale = width**-0.25 if kind == "exp" else 1.0
    gain = rows**-0.5 if MAPS[kind].scaled else 1.0
    return x.shape[2], heads, shared, *steps, scale, gain


def _options(x: Tensor, rows: int, kind: str) -> dict[str, Any]:
    block = _block(rows, kind)
    return {
        "F": rows,
        "D": x.shape[-1],
        "LAST": _last(rows, kind),
        "BLOCK_F": block,
        "BLOCK_D": padded(x.shape[-1], FEWEST),
        "KIND": kind,
        "num_warps": 4 if max(block, x.shape[-1]) <= 64 else 8,
        "num_stages": 2,
    }


def _block(rows: int, kind: str) -> int:
    """Rows of W at a time: all, and the padding, unless f takes them singly."""
    return FEWEST if kind == "exp" else padded(_last(rows, kind), FEWEST)


def _last(rows: int, kind: str) -> int:
    """The width of the last part of the features, with its padding."""
    parts = MAPS[kind].parts
    return -(-parts * rows // ALIGNED) * ALIGNED - (parts - 1) * rows


def as_multiplied(weight: Tensor, x: Tensor) -> Tensor:
    """W as kernels read it: in float32, unless it is bfloat16 as x, which saves a product."""
    exact = weight.dtype == x.dtype == torch.bfloat16
    return (weight.detach() if exact else weight.detach().float()).contiguous()


def halves(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """W as kernels multiply it, and the rest where bfloat16, as x is, has not all of it."""
    weight = as_multiplied(weight, x)
    if x.dtype != torch.bfloat16 or weight.dtype == torch.bfloat16:
        return weight, None
    upper = weight.bfloat16()
    return upper, (weight - upper).bfloat16()


def _strides(by_token: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if by_token is None else by_token.stride()
