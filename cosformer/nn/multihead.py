"""One attention layer around every mechanism: what differs between two is a word."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_bool, check_choice, check_dropout, check_mapping, check_whole
from cosformer.mechanisms import create, refuse
from cosformer.nn.positions import POSITIONS
from cosformer.nn.projections import HeadProjections

NO_OPTIONS: Mapping[str, Any] = {}
OWN = {"name": "mechanism", "heads": "num_heads", "key_heads": "num_kv_heads", "width": "embed_dim"}
"""What a mechanism is made with beside its options, and the layer's word for it."""


class LayerState(NamedTuple):
    """What a stream through a layer remembers."""

    mechanism: Any
    position: int


class MultiHeadAttention(HeadProjections):
    """Projections, positions, norm, gate and output around a mechanism, the same for each.

    Args:
        embed_dim, num_heads, num_kv_heads: as in :class:`CosformerAttention`; heads are of width
            ``embed_dim / num_heads``.
        mechanism: a name of ``cosformer.mechanisms.MECHANISMS``.
        options: of the mechanism, as ``{"horizon": 4096}``.
        context_dim: the width of ``context``, if it is not ``embed_dim``.
        positions: ``none``, ``learned`` (needs ``max_length``), ``sinusoidal``, ``rotary`` or
            ``spe``; they count from the first token given, padding included.
        norm: an RMSNorm per head after the mechanism; None: where its traits ask for one.
        gate: multiply the heads by silu of a projection of the input.
        dropout: the share of keys whose values are dropped in training.

    Where keys are meant to be the queries (Reformer), the layer hands on those.
    Where a mechanism has controls (a gate per token), the layer projects them from its input.

    >>> layer = MultiHeadAttention(64, 4, mechanism="performer")
    >>> x = torch.randn(1, 100, 64)
    >>> out = layer(x, causal=True)
    >>> prefix, state = layer.stream(x[:, :99])
    >>> last, state = layer.stream(x[:, 99:], state)
    >>> torch.allclose(out[:, 99:], last, atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mechanism: str = "cosformer",
        options: Mapping[str, Any] = NO_OPTIONS,
        num_kv_heads: int | None = None,
        context_dim: int | None = None,
        positions: str = "none",
        max_length: int | None = None,
        norm: bool | None = None,
        gate: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            kdim=context_dim,
            vdim=context_dim,
            batch_first=True,
            device=device,
            dtype=dtype,
        )
        check_bool("gate", gate)
        check_mapping("options", options)
        check_choice("positions", positions, POSITIONS)
        if max_length is not None and positions != "learned":
            raise ValueError(
                f"max_length must be None unless positions='learned', got {max_length}"
            )
        if positions == "learned" and self.kdim != embed_dim:
            raise ValueError("positions must not be 'learned' where context_dim differs")
        for option, own in OWN.items():
            if option in options:
                raise ValueError(f"options must not have {option}: it is the layer's {own}")
        self.dropout = check_dropout(dropout)
        scheme = POSITIONS[positions](embed_dim, self.head_dim, self.num_kv_heads, max_length)
        inner = create(
            mechanism, num_heads, scheme.key_width, key_heads=self.num_kv_heads, **options
        )
        if inner.traits.shared_qk and self.num_kv_heads != num_heads:
            raise ValueError(
                f"num_kv_heads must be num_heads={num_heads} for {mechanism}, whose keys are "
                f"the queries, got {num_kv_heads}"
            )
        if self.kdim != embed_dim and not inner.traits.cross:
            raise refuse(inner, "attend to another sequence", lambda other: other.cross)
        inner.value_width = self.head_dim
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.positions = scheme.to(**made)
        self.mechanism = inner.to(**made)
        self.controls = nn.ModuleDict(
            {
                name: nn.Linear(self.kdim, self.num_kv_heads, **made)
                for name in inner.traits.controls
            }
        )
        with_norm = inner.traits.norm_after if norm is None else norm
        check_bool("norm", with_norm)
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if with_norm else None
        self.gate = nn.Linear(embed_dim, embed_dim, bias=bias, **made) if gate else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        """Attend from x `[B, T, E]` to itself, or to a context `[B, S, C]`.

        key_mask `[B, S]` bool: True = real token. start: the index of the context that the first
        token of x stands at, so that a stream may look at one.
        """
        q, k, v, controls = self._project(x, context, self._first(x, context, causal, start))
        out, _ = self.mechanism(
            q,
            k,
            self._drop(v),
            causal=causal,
            key_mask=key_mask,
            start=start or None,
            controls=controls,
        )
        return self._finish(x, out)

    def stream(
        self, x: Tensor, state: LayerState | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        """The next tokens `[B, T, E]` of a causal stream; a state of None begins one.

        What a mechanism remembers (sums, a window, all tokens, or nothing: it raises) is in its
        traits. To go on from a padded batch, pad on the left. The state is not changed.
        """
        if not isinstance(state, LayerState | None):
            raise TypeError(f"state must be a LayerState, got {type(state).__name__}")
        position = 0 if state is None else state.position
        q, k, v, controls = self._project(x, None, position)
        before = self.mechanism.empty_state(k, v) if state is None else state.mechanism
        out, after = self.mechanism(
            q,
            k,
            self._drop(v),
            causal=True,
            key_mask=key_mask,
            state=before,
            controls=controls,
        )
        return self._finish(x, out), LayerState(after, position + x.shape[1])

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        """The mechanism's dense matrix `[B, H, T, S]`; quadratic, for pictures and tests."""
        q, k, _, controls = self._project(x, context, self._first(x, context, causal, start))
        weights: Tensor = self.mechanism.weights(
            q, k, causal=causal, key_mask=key_mask, start=start or None, controls=controls
        )
        return weights

    def _first(self, x: Tensor, context: Tensor | None, causal: bool, start: int) -> int:
        """Where the first token of x stands in the context."""
        check_whole("start", start, 0)
        if start and (context is None or causal):
            raise ValueError(f"start must be 0 unless x looks at a whole context, got {start}")
        if not causal or context is None:
            return start
        first = context.shape[1] - x.shape[1]  # the last token stands at the last of the context
        if first < 0 and type(self.positions) is not POSITIONS["none"]:
            raise ValueError(
                f"x must not be longer than a context under causal=True with positions, got "
                f"{x.shape[1]} and {context.shape[1]} tokens"
            )
        return first

    def _project(
        self, x: Tensor, context: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """q, k, v and controls; x begins at position `start`, a context at 0."""
        traits = self.mechanism.traits
        if context is not None and context is not x and not traits.cross:
            raise refuse(self.mechanism, "attend to another sequence", lambda other: other.cross)
        given = [("x", x, self.embed_dim)]
        given += [] if context is None else [("context", context, self.kdim)]
        for name, tokens, width in given:
            self.check_tokens(name, tokens)
            if tokens.dim() != 3 or tokens.shape[-1] != width:
                raise ValueError(
                    f"{name} must be [batch, length, {width}], got {list(tokens.shape)}"
                )
        if context is None and self.kdim != self.embed_dim:
            raise ValueError(f"context must be given, of width {self.kdim}, got None")
        source = x if context is None else context
        self.check_inputs(x, source, source)
        limit = self.positions.max_length
        length = max(start + x.shape[1], source.shape[1])
        if limit is not None and length > limit:
            raise ValueError(f"length must be at most max_length={limit}, got {length}")
        placed = self.positions.embed(x, start)
        placed_source = placed if context is None else self.positions.embed(context, 0)
        q, k, v = self.project(placed, placed_source, source, batched=True)
        if traits.shared_qk:
            k = q
        q, k = self.positions.encode(q, k, start, start if context is None else 0)
        controls = {name: project(source).mT for name, project in self.controls.items()}
        return q, k, v, controls

    def _finish(self, x: Tensor, out: Tensor) -> Tensor:
        if self.norm is not None:
            out = self.norm(out.to(self.norm.weight.dtype))  # autocast has rounded it alone
        if self.gate is not None:
            out = out * F.silu(self.gate(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.merge_heads(out, batched=True)

    def _drop(self, v: Tensor) -> Tensor:
        """Values of dropped keys are zero for all queries of a head, others scaled up."""
        if not self.training or not self.dropout:
            return v
        return v * F.dropout(torch.ones_like(v[..., :1]), self.dropout)
