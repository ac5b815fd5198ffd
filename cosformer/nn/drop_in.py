"""cosFormer attention with the interface of nn.MultiheadAttention (Qin et al., 2022)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cosformer.check import check_bools, check_choice, check_dropout, check_eps
from cosformer.nn.masks import read_attn_mask, read_key_padding_mask
from cosformer.nn.projections import HeadProjections
from cosformer.ops import (
    IMPLS,
    Rates,
    State,
    attention,
    attention_weights,
    attention_with_state,
    check_continues,
    check_weight,
    read_decay,
    read_horizon,
    step,
)
from cosformer.ops.problem import CONVENTIONS
from cosformer.runtime import compute_dtype


class CosformerAttention(HeadProjections):
    """Linear-time drop-in for ``nn.MultiheadAttention``: same arguments, same state-dict keys.

    What the arguments of ``nn.MultiheadAttention`` mean here:

    * ``dropout`` drops whole keys while training: the value of a token is zeroed for all queries
      of a head with this probability, and the others are scaled by 1 / (1 - p). Each attention
      weight is thus dropped with the usual probability, but the queries of a head share the draw.
    * ``add_bias_kv`` and ``add_zero_attn`` are refused: an appended key has no position, and the
      relu of a zero key has no weight. Prepend a learned token to the sequence instead.

    What it adds:

    * ``horizon``: the distance at which the cosine weight reaches zero, one number or one per key
      head; None means the length of each call, as in the paper. A stream needs a number.
      ``math.inf`` leaves the cosine out.
    * ``decay``: γ in (0, 1], by which a weight shrinks for every token between query and key. One
      number, one per key head as a sequence or tensor, or the name ``"multiscale"`` for those of
      :func:`cosformer.multiscale_decays`; None or 1 means no decay. The layer keeps numbers, which
      are not learned. As in :func:`cosformer.attention`, cross attention has no decay.
    * ``num_kv_heads``: grouped heads, ``num_heads / num_kv_heads`` query heads to a key head.
      ``in_proj_weight`` then has ``embed_dim + 2 * num_kv_heads * head_dim`` rows instead of
      ``3 * embed_dim``, so such checkpoints do not fit ``nn.MultiheadAttention``.
    * ``weight``, ``positions``, ``eps``, ``impl``: as in :func:`cosformer.attention`.

    >>> layer = CosformerAttention(64, 4, batch_first=True, horizon=4096)
    >>> x = torch.randn(1, 100, 64)
    >>> out, _ = layer(x, x, x, is_causal=True, need_weights=False)
    >>> prefix, state = layer.stream(x[:, :99])  # the same in two pieces
    >>> last, state = layer.stream(x[:, 99:], state)
    >>> torch.allclose(out[:, 99:], last, atol=1e-5)
    True
    """

    # The eval-time fast path of nn.TransformerEncoderLayer computes softmax attention from
    # in_proj_weight without calling forward; it gives way where this is False.
    _qkv_same_embed_dim: ClassVar[bool] = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        horizon: float | Sequence[float] | Tensor | None = None,
        decay: Rates | str | None = None,
        num_kv_heads: int | None = None,
        weight: str = "cosine",
        positions: str = "index",
        eps: float = 1e-6,
        impl: str = "auto",
    ) -> None:
        check_bools(add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn)
        if add_bias_kv:
            raise ValueError(
                "add_bias_kv must be False: the appended key has no position; "
                "prepend a learned token to the sequence instead"
            )
        if add_zero_attn:
            raise ValueError(
                "add_zero_attn must be False: the relu of a zero key has no weight; "
                "prepend a learned token to the sequence instead"
            )
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.dropout = check_dropout(dropout)
        self.horizon = read_horizon(horizon, num_heads, self.num_kv_heads)
        self.decay = read_decay(decay, self.num_kv_heads)
        self.weight = check_weight(weight)
        self.positions = check_choice("positions", positions, CONVENTIONS)
        self.eps = check_eps(eps)
        self.impl = check_choice("impl", impl, IMPLS)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value, as ``nn.MultiheadAttention.forward`` does.

        * query [T, B, E], or [B, T, E] with ``batch_first``, or [T, E]; key and value alike with S.
        * key_padding_mask [B, S] or [S]: True or -inf means ignore. Another float multiplies the
          weight of its key by exp(float), as adding it to a softmax score would. A query whose
          keys are all ignored gets zeros (before ``out_proj``), not NaN.
        * attn_mask: causal (as ``nn.Transformer.generate_square_subsequent_mask`` makes it) or
          blocking nothing; any other raises. ``is_causal=True`` alone is enough, and cheaper. Under
          ``torch.compile`` and on meta a mask needs it beside it, and it is then trusted.
        * need_weights: also return the exact map [B, T, S], or [B, H, T, S] without
          ``average_attn_weights``. This takes quadratic time and memory: pass False where you can.
        """
        check_bools(
            need_weights=need_weights,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        batched = self.check_inputs(query, key, value)
        q, k, v = self.project(query, key, value, batched)
        causal = read_attn_mask(attn_mask, is_causal, q, k)
        key_mask, k = read_key_padding_mask(key_padding_mask, k, batched=batched)
        kept = self.kept_keys(v)
        options: dict[str, Any] = {
            "causal": causal,
            "horizon": self.horizon,
            "decay": self.decay,
            "key_mask": key_mask,
            "positions": self.positions,
            "weight": self.weight,
            "eps": self.eps,
        }
        out = attention(q, k, v if kept is None else v * kept, **options, impl=self.impl)
        out = self.merge_heads(out, batched)
        if not need_weights:
            return out, None
        weights = attention_weights(q, k, **options)  # [B H T S]
        if kept is not None:
            weights = weights * kept.mT.repeat_interleave(self.num_heads // self.num_kv_heads, 1)
        if average_attn_weights:
            weights = weights.mean(1)
        return out, weights if batched else weights.squeeze(0)

    def empty_state(self, batch: int) -> State:
        """The state before the first token of so many streams; its size does not grow."""
        weight, width, options = self.out_proj.weight, self.head_dim, self._stream_options()
        options |= {"dtype": compute_dtype(weight.dtype), "device": weight.device}
        return State.empty(batch, self.num_kv_heads, width, width, **options)

    def stream(
        self, x: Tensor, state: State | None = None, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """The next tokens of a causal stream, and the state after them.

        A state of None begins a stream; the given state is not changed. x and out: [T, B, E], or
        [B, T, E] with ``batch_first``. key_padding_mask [B, T] is that of ``forward``; to go on
        from a padded batch, pad on the left.
        """
        options = self._stream_options()
        self._check_stream(x)
        q, k, v = self.project(x, x, x, batched=True)
        key_mask, k = read_key_padding_mask(key_padding_mask, k, batched=True)
        options |= {"state": state, "key_mask": key_mask, "eps": self.eps, "impl": self.impl}
        out, state = attention_with_state(q, k, self.drop_keys(v), **options)
        return self.merge_heads(out, batched=True), state

    forward_with_state = stream  # as the op is called: attention_with_state

    def step(self, x: Tensor, state: State) -> Tensor:
        """One more token, [1, B, E] or [B, 1, E] with ``batch_first``; ``state`` changes in place.

        For inference, under ``torch.no_grad()``: gradients go through :meth:`stream`.
        """
        options = self._stream_options()
        self._check_stream(x)
        q, k, v = self.project(x, x, x, batched=True)
        if q.shape[2] != 1:
            raise ValueError(
                f"x must hold one token in step, got {q.shape[2]}: use stream for more"
            )
        check_continues(state, k, v, **options)
        impl = "chunked" if self.impl == "reference" else self.impl  # one token is the formula
        out = step(q, k, self.drop_keys(v), state, eps=self.eps, impl=impl)
        return self.merge_heads(out, batched=True)

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"horizon={self.horizon}, decay={self.decay}, weight={self.weight!r}, "
            f"positions={self.positions!r}, dropout={self.dropout}, "
            f"batch_first={self.batch_first}, impl={self.impl!r}"
        )

    def _check_stream(self, x: Tensor) -> None:
        """Check that x holds tokens of a batch of streams."""
        self.check_tokens("x", x)
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"x must have a batch dimension and the width {self.embed_dim}, "
                f"got shape {tuple(x.shape)}"
            )

    def _stream_options(self) -> dict[str, Any]:
        """What a stream begins with and its state remembers; an error if the layer has no streams.

        Beside a state, a decay of None would mean the decay of the state, whatever it is.
        """
        if self.horizon is None:
            raise ValueError(
                "horizon must be a number for a stream, got None: None follows the length of each "
                "call, and a stream has none; construct or convert the layer with horizon=..."
            )
        if self.in_proj_weight is None:
            raise ValueError(
                "kdim and vdim must equal embed_dim for a stream, which is self-attention; "
                f"got kdim={self.kdim}, vdim={self.vdim}, embed_dim={self.embed_dim}"
            )
        if self.positions != "index":
            raise ValueError(f"positions must be 'index' for a stream, got {self.positions!r}")
        decay = 1.0 if self.decay is None else self.decay
        return {"horizon": self.horizon, "weight": self.weight, "decay": decay}
