"""Whom the op is measured against: softmax attention of PyTorch, linear attention of fla."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cosformer.bench.inputs import Inputs


def softmax(inputs: Inputs) -> Tensor:
    """Softmax attention by whatever backend PyTorch picks."""
    q, k, v = inputs.q, inputs.k, inputs.v
    is_grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=inputs.causal, enable_gqa=is_grouped)


def softmax_by(inputs: Inputs, *, backend: SDPBackend) -> Tensor:
    """Softmax attention by one backend, which may refuse."""
    with sdpa_kernel(backend):
        return softmax(inputs)


def fla_cosine(inputs: Inputs) -> Tensor:
    """cosFormer as a user of flash-linear-attention can have it: features, then their kernels."""
    table = cosine_table(inputs.q.shape[2], inputs.q.device)
    make = _compiled_features()
    q, k = (make(x.transpose(1, 2), table).transpose(1, 2) for x in (inputs.q, inputs.k))
    inputs = inputs._replace(q=q, k=k)
    return _on_inputs("linear_attn.chunk_linear_attn", inputs, normalize=True)


def fla_linear(inputs: Inputs, *, function: str) -> Tensor:
    """Linear attention of flash-linear-attention without cosine and denominator."""
    return _on_inputs(f"linear_attn.{function}", inputs, normalize=False)


def fla_retention(inputs: Inputs) -> Tensor:
    """A decay per head, the ones of retention, without cosine and denominator."""
    return _on_inputs("retention.chunk_retention", inputs)


def fla_with_gates(inputs: Inputs, *, function: str) -> Tensor:
    """A decay per token, or per token and column of a key, without cosine and denominator."""
    gates = _for_every_query_head(inputs.gates, inputs).transpose(1, 2)
    return _on_inputs(function, inputs, g=gates)


def by_fla(function: str, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A function of fla.ops, which works on `[B, T, H, D]`, on our `[B, H, T, D]`."""
    place, _, name = function.rpartition(".")
    attend = getattr(importlib.import_module(f"fla.ops.{place}"), name)
    out: Tensor = attend(*(x.transpose(1, 2) for x in (q, k, v)), **given)[0]
    return out.transpose(1, 2)


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


def _on_inputs(function: str, inputs: Inputs, **given: Any) -> Tensor:
    """A function of fla without the factor 1/√d."""
    if inputs.cu_seqlens is not None:
        given["cu_seqlens"] = inputs.cu_seqlens
    k, v = (_for_every_query_head(x, inputs) for x in (inputs.k, inputs.v))
    return by_fla(function, inputs.q, k, v, scale=1.0, **given)


def _for_every_query_head(x: Tensor, inputs: Inputs) -> Tensor:
    """fla has no grouped heads: keys are repeated at every call, as its users must."""
    groups = inputs.q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


@functools.cache
def _compiled_features() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(features, dynamic=True)
