"""Rotary features of keys, and of queries over their denominators: by torch, or by kernels.

Attention is linear in the features of a query. A denominator that knows no positions needs sums of
keys only; divided by it before the sweep, queries leave one sweep without a quotient. Kernels read
k once for sums over blocks of tokens, and q and k once for features and what a block adds to them;
the gradients go the same way, with q in the place of k.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from cosformer.ops.features.formula import formula_gradients
from cosformer.ops.features.projected import FEWEST
from cosformer.ops.features.rotary import HEADS, positions, rotate
from cosformer.ops.problem.normaliser import denominator
from cosformer.ops.triton.tiles import padded
from cosformer.runtime import compute_dtype, kernels_serve, on_device_of, recorded

BLOCK = 64
"""Tokens in a block: tensor cores get no fewer rows."""
WIDEST = 128
"""Columns of q and k, whose tiles must fit in registers."""


class Setting(NamedTuple):
    """What queries see, and by what features are turned and divided."""

    causal: bool
    base: float
    eps: float  # the smallest denominator


def is_served(q: Tensor, k: Tensor, start: int) -> bool:
    """Whether kernels divide q: queries and keys of a block of tokens stand at the same places."""
    shared = q.shape[2] == k.shape[2] and start == 0
    return shared and q.shape[3] <= WIDEST and kernels_serve(q) and kernels_serve(k)


def by_formula(
    q: Tensor, k: Tensor, key_mask: Tensor | None, setting: Setting
) -> tuple[Tensor, Tensor]:
    """R_i φ(q_i)/Z_i and R_j φ(k_j), φ = 1 + elu; Z_i = max(Σ_j φ(q_i)·φ(k_j), eps).

    Args:
        q, k: `[B, H, T, D]`, `[B, H_kv, T, D]`.
        key_mask: `[B, T]` bool; a masked key has no features.
    """
    dtype = compute_dtype(q.dtype)
    queries, keys = (1 + F.elu(x.to(dtype)) for x in (q, k))
    if key_mask is not None:
        keys = keys.masked_fill(~key_mask[:, None, :, None], 0)
    sums = keys.cumsum(2) if setting.causal else keys.sum(2, keepdim=True)
    groups = queries.unflatten(1, (k.shape[1], -1))
    total = (groups * sums[:, :, None]).sum(-1, keepdim=True).flatten(1, 2)
    divided = queries / denominator(total, "clamp", setting.eps)
    position = positions(0, q.shape[2], q)
    turned_q, turned_k = (rotate(x, position, setting.base).to(q.dtype) for x in (divided, keys))
    return turned_q, turned_k


def by_kernel(
    q: Tensor, k: Tensor, key_mask: Tensor | None, setting: Setting
) -> tuple[Tensor, Tensor]:
    """The same, in kernels."""
    turned_q, turned_k = _Divided.apply(q, k, key_mask, setting)
    return turned_q, turned_k


class _Divided(Function):
    """(q, k) -> turned features; derivatives beyond the first are those of the formula."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, key_mask: Tensor | None, setting: Setting
    ) -> tuple[Tensor, Tensor]:
        real = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        with on_device_of(q):
            sums = _sums(k, real, setting)
            turned_q, turned_k, total = _turned(q, k, real, sums, setting)
        ctx.setting = setting
        ctx.save_for_backward(q, k, key_mask, real, sums, total)
        return turned_q, turned_k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, key_mask, real, sums, total = ctx.saved_tensors
        setting, needs = ctx.setting, ctx.needs_input_grad[:2]
        if recorded():

            def formula(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
                return by_formula(q, k, key_mask, setting)

            return *formula_gradients(formula, (q, k), needs, grads), None, None
        with on_device_of(q):
            dq, dk = _gradients(q, k, real, sums, total, grads, setting)
        return dq, dk, None, None


def _sums(k: Tensor, real: Tensor | None, setting: Setting) -> Tensor:
    """Of φ(k), as kernels read them."""
    from cosformer.ops.divided_kernels import sums_kernel

    sums = _room(k)
    _launch(sums_kernel, k, (k, real, sums), (_step(real), *k.stride()))
    return _gathered(sums, setting)


def _turned(
    q: Tensor, k: Tensor, real: Tensor | None, sums: Tensor, setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    """R φ(q)/Z, R φ(k), and Z before eps."""
    from cosformer.ops.divided_kernels import turn_kernel

    turned_q, turned_k = q.new_empty(q.shape), k.new_empty(k.shape)
    total = q.new_empty(q.shape[:3], dtype=torch.float32)
    tensors = (q, k, real, sums, turned_q, turned_k, total)
    numbers = (sums.shape[2], _step(real), setting.eps, *q.stride(), *k.stride())
    _launch(turn_kernel, k, tensors, numbers, **_both(q, k, setting), **_turns(q, setting))
    return turned_q, turned_k, total


def _gradients(
    q: Tensor,
    k: Tensor,
    real: Tensor | None,
    sums: Tensor,
    total: Tensor,
    grads: tuple[Tensor, ...],
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    from cosformer.ops.divided_kernels import gradients_kernel, slopes_kernel

    grads = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in grads)
    slope, after = torch.empty_like(total), _room(q)
    numbers = (setting.eps, *q.stride(), *grads[0].stride()[:3])
    tensors = (q, total, grads[0], slope, after)
    _launch(slopes_kernel, q, tensors, numbers, **_turns(q, setting))
    after = _gathered(after, setting)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    strides = (*q.stride(), *k.stride(), *grads[0].stride()[:3], *grads[1].stride()[:3])
    _launch(
        gradients_kernel, k, (q, k, real, sums, total, slope, after, *grads, dq, dk),
        (sums.shape[2], _step(real), setting.eps, *strides), HEADS,
        **_both(q, k, setting), **_turns(q, setting),
    )  # fmt: skip
    return dq, dk


def _launch(
    kernel: Any,
    over: Tensor,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    each: int = 1,
    **options: Any,
) -> None:
    """A program for each block of tokens and `each` heads of a tensor, which share its angles."""
    batch, heads, length, width = over.shape
    blocks, parts, columns = _blocks(over), -(-heads // each), padded(width, FEWEST)
    kernel[(blocks * parts * batch,)](
        *tensors, blocks, parts, length, heads, *numbers,
        D=width, HEADS=each, BLOCK_T=BLOCK, PAIRS=columns // 2,
        num_warps=4 if columns == FEWEST else 8, num_stages=1, **options,
    )  # fmt: skip


def _turns(x: Tensor, setting: Setting) -> dict[str, Any]:
    return {"LOG_BASE": math.log2(setting.base), "SHORT": x.dtype == torch.bfloat16}


def _both(q: Tensor, k: Tensor, setting: Setting) -> dict[str, Any]:
    return {"GROUPS": q.shape[1] // k.shape[1], "CAUSAL": setting.causal}


def _room(x: Tensor) -> Tensor:
    """For sums over blocks of tokens, and a 0."""
    return x.new_empty(*x.shape[:2], _blocks(x) + 1, x.shape[3], dtype=torch.float32)


def _gathered(sums: Tensor, setting: Setting) -> Tensor:
    """Over all blocks, or in place up to each."""
    from cosformer.ops.divided_kernels import cumulate_kernel

    if not setting.causal:
        return sums.sum(2, keepdim=True)
    batch, heads, slots, width = sums.shape
    cumulate_kernel[(batch * heads,)](
        sums, slots, D=width, BLOCK=BLOCK, BLOCK_D=padded(width, FEWEST), num_warps=8
    )
    return sums


def _blocks(x: Tensor) -> int:
    return -(-x.shape[2] // BLOCK)


def _step(real: Tensor | None) -> int:
    return 0 if real is None else real.stride(0)
