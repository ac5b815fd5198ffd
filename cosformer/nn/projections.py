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
    dropout: float

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
        head_dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        """head_dim: the width of a head's queries and keys; None: embed_dim / num_heads.
        value_dim: the width of a head's values; None: head_dim."""
        super().__init__()
        check_bools(bias=bias, batch_first=batch_first)
        optional = {"num_kv_heads": num_kv_heads, "kdim": kdim, "vdim": vdim}
        optional |= {"head_dim": head_dim, "value_dim": value_dim}
        given = {name: size for name, size in optional.items() if size is not None}
        for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, **given}.items():
            check_whole(name, size, 1)
        if head_dim is None and embed_dim % num_heads:
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
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == self.vdim == embed_dim
        q_width, k_width, v_width = widths = self.projection_widths()
        self.register_parameter("in_proj_weight", empty(sum(widths), embed_dim) if packed else None)
        self.register_parameter("q_proj_weight", None if packed else empty(q_width, embed_dim))
        self.register_parameter("k_proj_weight", None if packed else empty(k_width, self.kdim))
        self.register_parameter("v_proj_weight", None if packed else empty(v_width, self.vdim))
        self.register_parameter("in_proj_bias", empty(sum(widths)) if bias else None)
        heads_width = num_heads * self.value_dim
        self.out_proj = nn.Linear(heads_width, embed_dim, bias=bias, device=device, dtype=dtype)
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
        """q [B, H, T, D], k [B, H_kv, S, D], v [B, H_kv, S, V]: views of what was projected."""
        return self.split_heads(*self.project_flat(query, key, value), batched)

    def project_flat(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [.., H·D], k [.., H_kv·D] and v [.., H_kv·V]: the heads of a token side by side."""
        widths = self.projection_widths()
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            q, k, v = F.linear(query, packed, bias).split(widths, -1)
            return q, k, v
        if packed is not None:
            weights = packed.split(widths)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.split(widths)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
        return q, k, v

    def project_queries(self, x: Tensor) -> Tensor:
        """q alone of `project_flat(x, x, x)`."""
        return self._project_rows(x, slice(self.projection_widths()[0]))

    def project_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k and v alone of `project_flat(x, x, x)`."""
        first, *others = self.projection_widths()
        k, v = self._project_rows(x, slice(first, None)).split(others, -1)
        return k, v

    def _project_rows(self, x: Tensor, rows: slice) -> Tensor:
        """The product of x and some rows of the packed weights."""
        assert self.in_proj_weight is not None
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return F.linear(x, self.in_proj_weight[rows], bias)

    def split_heads(
        self, q: Tensor, k: Tensor, v: Tensor, batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `project_flat` gives as [B, H, T, D], [B, H_kv, S, D] and [B, H_kv, S, V]."""
        q, k = (self._split(x, self.head_dim, batched) for x in (q, k))
        return q, k, self._split(v, self.value_dim, batched)

    def merge_heads(self, out: Tensor, batched: bool) -> Tensor:
        """out [B, H, T, V] through out_proj, in the layout of the inputs."""
        if not batched:
            out = out.squeeze(0).transpose(0, 1)
        else:
            out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        merged: Tensor = self.out_proj(out.flatten(-2))
        return merged

    def kept_keys(self, v: Tensor) -> Tensor | None:
        """0 for a dropped key, 1 / (1 - p) for another: [B, H_kv, S, 1]; None: nothing drops."""
        if not self.training or not self.dropout:
            return None
        return F.dropout(torch.ones_like(v[..., :1]), self.dropout)

    def drop_keys(self, v: Tensor) -> Tensor:
        """The values of dropped keys become zero for all queries of a head, others grow."""
        kept = self.kept_keys(v)
        return v if kept is None else v * kept

    def projection_widths(self) -> list[int]:
        """How many columns queries, keys and values have, of all heads together."""
        keys = self.num_kv_heads
        return [self.num_heads * self.head_dim, keys * self.head_dim, keys * self.value_dim]

    def _split(self, x: Tensor, width: int, batched: bool) -> Tensor:
        x = x.unflatten(-1, (-1, width))  # [.. H D]
        if not batched:
            return x.unsqueeze(0).transpose(1, 2)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _reset_parameters(self) -> None:
        """Draw the weights as nn.MultiheadAttention does: same distributions, same order."""
        for name in ("in", "q", "k", "v"):
            if (weight := getattr(self, f"{name}_proj_weight")) is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
