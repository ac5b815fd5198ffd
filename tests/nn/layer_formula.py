"""The layer written down a second time: quadratic, in float64, sharing only the weights; tokens."""

from collections.abc import Sequence

import torch
from formula import F64, cosformer_map
from torch import Tensor, nn


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def quadratic(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    horizon: float | Tensor | None = None,
    decay: Sequence[float] | None = None,
    key_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, E] and weights [B, H, T, S] of batch-first inputs.

    decay: one per key head; key_scale [B, S].
    """
    p = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    if "in_proj_weight" in p:
        projections = p["in_proj_weight"].split(sizes)
    else:
        projections = [p[f"{name}_proj_weight"] for name in "qkv"]
    biases = p.get("in_proj_bias", torch.zeros(sum(sizes), dtype=F64)).split(sizes)
    q, k, v = (
        (x.double() @ w.T + b).unflatten(-1, (-1, width)).transpose(1, 2)
        for x, w, b in zip((query, key, value), projections, biases, strict=True)
    )
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    if key_scale is not None:
        k = k * key_scale.double()[:, None, :, None]  # of relu(k) as well
    about = {"horizon": horizon, "causal": causal, "decay": decay, "eps": layer.eps}
    weights = cosformer_map(q, k, **about)
    out = (weights @ v).transpose(1, 2).flatten(2)
    bias = p.get("out_proj.bias", torch.zeros(1, dtype=F64))
    return out @ p["out_proj.weight"].T + bias, weights
