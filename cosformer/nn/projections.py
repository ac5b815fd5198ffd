"""The projections of nn.MultiheadAttention: the same parameters under the same names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_bools, check_tensor, check_whole
from cosformer.runtime import autocasts


class HeadProjections(nn.Module):
    """Projects query, key and value to heads, and heads back to the model's width.

    A base class: what happens between :meth:`project` and :meth:`merge_heads` is up to the layer.
    Inputs are [T, B, E], or [B, T, E] with ``batch_first``, or unbatched [T, E].
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        *,
        bias: bool,
        kdim: int | None,
        vdim: int | None,
        batch_first: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_bools(bias=bias, batch_first=batch_first)
        optional = {"num_kv_heads": num_kv_heads, "kdim": kdim, "vdim": vdim}
        given = {name: size for name, size in optional.items() if size is not None}
        for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, **given}.items():
            check_whole(name, size, 1)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads={num_heads}, got {embed_dim}"
            )
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a real floating type, got {dtype}")
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == self.vdim == embed_dim
        q_width, k_width, v_width = widths = self._projection_widths()
        self.register_parameter("in_proj_weight", empty(sum(widths), embed_dim) if packed else None)
        self.register_parameter("q_proj_weight", None if packed else empty(q_width, embed_dim))
        self.register_parameter("k_proj_weight", None if packed else empty(k_width, self.kdim))
        self.register_parameter("v_proj_weight", None if packed else empty(v_width, self.vdim))
        self.register_parameter("in_proj_bias", empty(sum(widths)) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self._reset_parameters()

    def check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Check the three inputs of attention; whether they have a batch dimension."""
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            self.check_tokens(name, x)
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                raise ValueError(
                    f"{name} must have shape [length, {width}] or, like all three inputs, a batch "
                    f"dimension more; got {tuple(x.shape)} with query {tuple(query.shape)}"
                )
        batched = query.dim() == 3
        batch_dim = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                "key and value must agree in length and batch, "
                f"got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if batched and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ValueError(
                f"query and key must agree in dimension {batch_dim}, the batch "
                f"(batch_first={self.batch_first}), got {tuple(query.shape)} and {tuple(key.shape)}"
            )
        return batched

    def check_tokens(self, name: str, x: Any) -> None:
        """Check that x is a dense tensor of the weights' dtype, or of one that autocast casts."""
        check_tensor(name, x)
        if x.is_nested:
            raise ValueError(
                f"{name} must not be a nested tensor: pass a padded one with key_padding_mask; "
                "in an nn.TransformerEncoder, convert the whole encoder with cosformer.convert "
                "or set its use_nested_tensor = False"
            )
        packed = self.in_proj_weight
        weight = self.q_proj_weight if packed is None else packed
        assert weight is not None
        if x.dtype == weight.dtype or (
            autocasts(x) and x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype)
        ):
            return
        raise ValueError(f"{name} must have the dtype of the layer, {weight.dtype}, got {x.dtype}")

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, D], k and v [B, H_kv, S, D]: views of the projections, not copies."""
        widths = self._projection_widths()
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            projected = F.linear(query, packed, bias).split(widths, -1)
        else:
            if packed is not None:
                weights = packed.split(widths)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None, None, None) if bias is None else bias.split(widths)
            inputs = (query, key, value)
            projected = tuple(map(F.linear, inputs, weights, biases))
        q, k, v = (self._split_heads(x, batched) for x in projected)
        return q, k, v

    def merge_heads(self, out: Tensor, batched: bool) -> Tensor:
        """out [B, H, T, D] through out_proj, in the layout of the inputs."""
        if not batched:
            out = out.squeeze(0).transpose(0, 1)
        else:
            out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        merged: Tensor = self.out_proj(out.flatten(-2))
        return merged

    def _split_heads(self, x: Tensor, batched: bool) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))  # [.. H D]
        if not batched:
            return x.unsqueeze(0).transpose(1, 2)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _projection_widths(self) -> list[int]:
        narrow = self.num_kv_heads * self.head_dim
        return [self.embed_dim, narrow, narrow]

    def _reset_parameters(self) -> None:
        """Draw the weights as nn.MultiheadAttention does: same distributions, same order."""
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
