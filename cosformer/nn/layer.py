"""One attention layer around every mechanism: to compare two mechanisms, change one word."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cosformer.check import (
    check_bool,
    check_choice,
    check_dropout,
    check_key_mask,
    check_mapping,
    check_whole,
)
from cosformer.mechanisms import Split, create, keep_in_place, mechanism_class, refuse
from cosformer.nn.convolution import ShortConvolution
from cosformer.nn.positions import POSITIONS
from cosformer.nn.projections import HeadProjections
from cosformer.ops import GATES
from cosformer.runtime import autocasts

NO_OPTIONS: Mapping[str, Any] = {}
HORIZON = 4096
"""The horizon of a layer whose options name none."""
CONVOLVED = ("input", "qkv")
"""What a short convolution may act on."""
OWN = {"name": "mechanism", "heads": "num_heads", "key_heads": "num_kv_heads", "width": "embed_dim"}
"""Arguments of a mechanism that are no options -> the argument of the layer that sets them."""


class LayerState(NamedTuple):
    """What a stream through a layer remembers."""

    mechanism: Any  # what the mechanism remembers
    position: int | Tensor  # how many tokens came before; [B] in memory of a fixed size
    conv: Tensor | None = None  # [B, width − 1, columns]: last inputs of the short convolution


class Projected(NamedTuple):
    """Queries, keys, values and controls that a layer projects from its tokens."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, H_kv, S, D]
    v: Tensor  # [B, H_kv, S, V]
    controls: dict[str, Tensor]  # [B, H_kv, S] each
    x: Tensor  # [B, T, E], of which the gate is made
    conv: Tensor | None  # what a stream remembers of the short convolution


class AttentionLayer(HeadProjections):
    """Projections, positions, norm, gate and output around any mechanism, the same for each.

    Args:
        embed_dim, num_heads, num_kv_heads: as in :class:`CosformerAttention`.
        head_dim: the width of a head's queries and keys; None: ``embed_dim / num_heads``.
        value_dim: the width of a head's values; None: ``head_dim``. Wider values make the state of
            a linear mechanism larger.
        mechanism: a name of ``cosformer.mechanisms.MECHANISMS``.
        options: options of the mechanism, such as ``{"horizon": 8192}``. Where the mechanism has
            a horizon and the options do not name it, the horizon is 4096: `forward` and `stream`
            then take up to 4096 tokens and agree with each other. ``{"horizon": None}`` follows
            the length of each call, as in the paper; such a layer cannot stream.
        context_dim: the width of ``context``, if it is not ``embed_dim``.
        positions: ``none``, ``learned`` (needs ``max_length``), ``sinusoidal``, ``rotary`` or
            ``spe``. They count from the first token given, and padding counts.
        max_length: how many learned positions there are; None for other position schemes.
        norm: whether an RMSNorm per head follows the mechanism; None: where its traits ask for it.
        qk_norm: whether an RMSNorm per head, with weights, stands before the mechanism (and
            before rotary positions), one for queries and one for keys.
        gate: ``silu`` or ``sigmoid``: the heads are multiplied by that of a projection of the
            input, after the norm. True: ``silu``; False: no gate.
        conv: the width of a short convolution along the tokens, each column by itself, as 4; 0:
            none. With ``causal=True`` it sees the last ``conv`` tokens, otherwise as many on either
            side, for which it must be odd, as 5. Padding behind ``key_mask`` counts as zeros. A
            layer with a convolution looks at its own tokens alone, not at a context.
        conv_on: what the convolution acts on: ``qkv``, that is queries, keys and values after their
            projections, or ``input``, that is the layer's input before all its projections.
        dropout: the share of keys whose values are dropped in training.

    A mechanism whose keys are its queries (Reformer) gets the queries as keys.
    A mechanism with controls (a gate per token) gets projections of the layer's input. Where the
    mechanism says what a control should be at first, the projection begins with that bias.

    A stream goes through three methods. ``stream`` takes the next tokens and leaves the given state
    as it is; ``step`` takes one token and uses the given state up; ``empty_state`` begins.

    >>> layer = AttentionLayer(64, 4)
    >>> x = torch.randn(1, 100, 64)
    >>> out = layer(x, causal=True)
    >>> prefix, state = layer.stream(x[:, :99])
    >>> with torch.no_grad():
    ...     last, state = layer.step(x[:, 99:], state)
    >>> torch.allclose(out[:, 99:], last, atol=1e-5)
    True
    """

    split: Split | None = None
    """The ranks of which each has a stretch of every sequence in `forward`, set by
    ``cosformer.distributed.split``."""

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
        qk_norm: bool = False,
        gate: bool | Literal["silu", "sigmoid"] = False,
        conv: int = 0,
        conv_on: Literal["input", "qkv"] = "qkv",
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if context_dim is not None:
            check_whole("context_dim", context_dim, 1)
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
            head_dim=head_dim,
            value_dim=value_dim,
        )
        gate_kind = check_gate(gate)
        check_whole("conv", conv, 0)
        check_conv_on(conv, conv_on)
        check_bool("qk_norm", qk_norm)
        check_mapping("options", options)
        check_choice("positions", positions, ("none", *POSITIONS))
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
        scheme = None
        if positions != "none":
            scheme = POSITIONS[positions](embed_dim, self.head_dim, self.num_kv_heads, max_length)
        if mechanism_class(mechanism).stream_option == "horizon":
            options = {"horizon": HORIZON, **options}
        key_width = self.head_dim if scheme is None else scheme.key_width
        inner = create(mechanism, num_heads, key_width, key_heads=self.num_kv_heads, **options)
        if inner.traits.shared_qk and self.num_kv_heads != num_heads:
            raise ValueError(
                f"num_kv_heads must be num_heads={num_heads} for {mechanism}, whose keys are "
                f"the queries, got {num_kv_heads}"
            )
        if self.kdim != embed_dim and not inner.traits.cross:
            raise refuse(inner, "attend to another sequence", lambda other: other.cross)
        if conv and self.kdim != embed_dim:
            raise ValueError(f"conv must be 0 where context_dim differs, got {conv}")
        inner.value_width = self.value_dim
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.positions = None if scheme is None else scheme.to(**made)
        self.mechanism = inner.to(**made)
        self.controls = nn.ModuleDict(
            {
                name: _begin(
                    nn.Linear(self.kdim, self.num_kv_heads, **made), inner.control_bias(name)
                )
                for name in inner.traits.controls
            }
        )
        with_norm = inner.traits.norm_after if norm is None else norm
        check_bool("norm", with_norm)
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-6, **made) if with_norm else None
        self.gate_kind, gate_width = gate_kind, num_heads * self.value_dim
        self.gate = nn.Linear(embed_dim, gate_width, bias=bias, **made) if gate_kind else None
        with_key_norm = qk_norm and not inner.traits.shared_qk  # those keys are normed queries
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if with_key_norm else None
        columns = embed_dim if conv_on == "input" else sum(self.projection_widths())
        self.conv = ShortConvolution(columns, conv, **made) if conv else None
        self.conv_on = conv_on

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
        token of x stands at, so that a stream may look at a context.
        """
        self._check_inputs(x, context)
        first = self._first(x, context, causal, start)
        if self.split is not None:
            return self._forward_split(x, self.split, causal, key_mask)
        made = self._project(x, context, first, causal=causal, key_mask=key_mask)
        out, _ = self._attend(made, causal=causal, key_mask=key_mask, start=start or None)
        return self._finish(out, self._gated(made.x))

    def _forward_split(
        self, x: Tensor, split: Split, causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """`forward` on one of many ranks: gates, and queries if they may come later, are made while
        messages travel."""
        later = self.mechanism.queries_later and self.positions is None
        later = later and (self.conv is None or self.conv_on == "input")
        first = split.start(x.shape[1])
        made = self._project(
            x, None, first, causal=causal, key_mask=key_mask, split=split, without_queries=later
        )
        gates: list[Tensor | None] = []
        autocast = autocasts(x)  # which the mechanism turns off

        def meanwhile() -> Tensor | None:
            with torch.autocast(x.device.type, enabled=autocast):
                gates.append(self._gated(made.x))
                return self._queries(made.x, made.v.dtype) if later else None

        split = split.meanwhile(meanwhile)
        out, _ = self._attend(made, causal=causal, key_mask=key_mask, split=split)
        return self._finish(out, gates[0] if gates else self._gated(made.x))

    def empty_state(self, batch: int) -> LayerState:
        """The state before the first token of so many streams.

        What a mechanism remembers is in its traits: sums, a window, or all tokens. One that cannot
        stream raises.
        """
        check_whole("batch", batch, 0)
        self._check_whole("a stream needs")
        conv = None if self.conv is None else self.conv.empty_state(batch)
        return LayerState(self.mechanism.empty_state(*self._no_tokens(batch)), 0, conv)

    def stream(
        self, x: Tensor, state: LayerState | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        """The next tokens `[B, T, E]` of a causal stream, and the state after them.

        A state of None begins a stream; the given state is not changed. key_mask `[B, T]` bool:
        True = real token; to go on from a padded batch, pad on the left.
        """
        if not isinstance(state, LayerState | None):
            raise TypeError(f"state must be a LayerState, got {type(state).__name__}")
        self._check_whole("a stream needs")
        self._check_inputs(x, None)
        before = self.empty_state(x.shape[0]) if state is None else state
        self._check_conv_state(before, len(x))
        made = self._project(
            x, None, before.position, causal=True, key_mask=key_mask, before=before.conv
        )
        out, after = self._attend(made, causal=True, key_mask=key_mask, state=before.mechanism)
        state = LayerState(after, before.position + x.shape[1], made.conv)
        return self._finish(out, self._gated(made.x)), state

    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """One more token `[B, 1, E]` of a causal stream, and the state after it.

        For inference, under ``torch.no_grad()``: gradients go through :meth:`stream`. The given
        state is used up, because its tensors may change in place: go on with the returned one.
        """
        self.check_step(x, state)
        return self.take_step(x, state)

    def check_step(self, x: Tensor, state: LayerState) -> None:
        """Check the arguments of `step`."""
        self._check_whole("a stream needs")
        self._check_inputs(x, None)
        if x.shape[1] != 1:
            raise ValueError(
                f"x must be one token [batch, 1, {self.embed_dim}] in step, got {list(x.shape)}: "
                "use stream for more"
            )
        self.check_state(state, len(x))
        if torch.is_grad_enabled() and any(y.requires_grad for y in (x, self.out_proj.weight)):
            raise ValueError("step records no gradients: use stream, or torch.no_grad() around it")

    def check_state(self, state: LayerState, batch: int) -> None:
        """Refuse a state that is not of so many streams through such a layer."""
        if not isinstance(state, LayerState):
            raise TypeError(f"state must be a LayerState, got {type(state).__name__}")
        like, shape = self.out_proj.weight.new_empty(()), (batch, self.num_kv_heads, 1)
        k, v = like.expand(*shape, self.mechanism.width), like.expand(*shape, self.value_dim)
        self.mechanism.check_state(state.mechanism, k, v)
        self._check_conv_state(state, batch)

    def held_state(self, batch: int, most: int, position: Tensor, length: Tensor) -> LayerState:
        """The state of so many streams in memory of a fixed size, which `take_step` alone changes.

        Args:
            most: the most tokens of a stream, where the mechanism keeps all of them.
            position, length: `[B]` int64, how many tokens each stream has had, without padding
                and with it; the caller moves them on.
        """
        self._check_whole("a stream needs")
        conv = None if self.conv is None else self.conv.empty_state(batch)
        held = self.mechanism.held_state(*self._no_tokens(batch), most, position)
        return LayerState(held, length, conv)

    def take_step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """`step` for callers that have checked x and the state, as models have."""
        position = state.position
        if isinstance(position, int) and position >= (self.mechanism.traits.max_length or math.inf):
            self.mechanism.check_length(position + 1)
        made = self._project(x, None, position, causal=True, before=state.conv)
        out, after = self.mechanism.step(
            made.q, made.k, self.drop_keys(made.v), state.mechanism, controls=made.controls
        )
        out = self._finish(out, self._gated(made.x))
        if isinstance(position, int):
            return out, LayerState(after, position + 1, made.conv)
        if after is not state.mechanism:
            keep_in_place(state.mechanism, after)
        if state.conv is not None and made.conv is not None:
            state.conv.copy_(made.conv)
        return out, state

    def _check_whole(self, what: str) -> None:
        """Refuse a call that cannot be computed where each rank has a stretch of the sequence."""
        if self.split is not None:
            raise ValueError(
                f"{what} whole sequences, got a layer that is split over ranks: "
                "cosformer.distributed.unsplit first; a prompt of any length can then be read by "
                "stream in pieces, on one rank"
            )

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
        self._check_whole("weights need")
        self._check_inputs(x, context)
        first = self._first(x, context, causal, start)
        made = self._project(x, context, first, causal=causal, key_mask=key_mask)
        about: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "start": start or None}
        return self.mechanism.weights(made.q, made.k, controls=made.controls, **about)

    def _check_inputs(self, x: Tensor, context: Tensor | None) -> None:
        another = None if context is x else context
        if another is not None and not self.mechanism.traits.cross:
            raise refuse(self.mechanism, "attend to another sequence", lambda other: other.cross)
        if another is not None and self.split is not None:
            raise ValueError(
                "context must be None in a layer that is split over ranks, which attends to its "
                f"own tokens, got {list(another.shape)}"
            )
        if context is None and self.kdim != self.embed_dim:
            raise ValueError(f"context must be given, of width {self.kdim}, got None")
        if another is not None and self.conv is not None:
            raise ValueError(
                f"context must be None in a layer with conv={self.conv.width}, got "
                f"{list(another.shape)}: make the layer without a convolution"
            )
        given = [("x", x, self.embed_dim)]
        given += [] if context is None else [("context", context, self.kdim)]
        for name, tokens, width in given:
            self.check_tokens(name, tokens)
            if tokens.dim() != 3 or tokens.shape[-1] != width:
                raise ValueError(
                    f"{name} must be [batch, length, {width}], got {list(tokens.shape)}"
                )
        if context is not None and len(context) != len(x):
            raise ValueError(f"context must have the batch of x, {len(x)}, got {len(context)}")

    def _first(self, x: Tensor, context: Tensor | None, causal: bool, start: int) -> int:
        """The index of the context that the first token of x stands at."""
        check_whole("start", start, 0)
        if start and (context is None or causal):
            raise ValueError(f"start must be 0 unless x looks at a whole context, got {start}")
        if not causal or context is None:
            return start
        first = context.shape[1] - x.shape[1]  # the last token stands at the last of the context
        if first < 0 and self.positions is not None:
            raise ValueError(
                f"x must not be longer than a context under causal=True with positions, got "
                f"{x.shape[1]} and {context.shape[1]} tokens"
            )
        return first

    def _no_tokens(self, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values without tokens, `[B, H_kv, 0, ·]`, with which a stream begins."""
        empty, shape = self.out_proj.weight.new_empty, (batch, self.num_kv_heads, 0)
        return empty(*shape, self.mechanism.width), empty(*shape, self.value_dim)

    def _check_conv_state(self, state: LayerState, batch: int) -> None:
        if self.conv is not None:
            self.conv.check_state(state.conv, batch)
        elif state.conv is not None:
            raise ValueError("state.conv must be None for a layer without a convolution")

    def _project(
        self,
        x: Tensor,
        context: Tensor | None,
        start: int | Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None = None,
        before: Tensor | None = None,
        split: Split | None = None,
        without_queries: bool = False,
    ) -> Projected:
        """What the mechanism gets; x begins at position `start`, a context at 0.

        causal, key_mask, before, split: arguments of the short convolution, without which a layer
        with a context is made. without_queries: q has a shape, and no numbers yet.
        """
        conv, conv_state = self.conv, None
        if conv is not None:
            check_key_mask(key_mask, x[:, None])
        mixed = {"causal": causal, "key_mask": key_mask, "before": before, "split": split}
        another = None if context is x else context
        if conv is not None and self.conv_on == "input":
            x, conv_state = conv(x, **mixed)
        source = x if another is None else another
        scheme, key_start = self.positions, start if context is None else 0
        rows, source_rows = x, source
        if scheme is not None:
            rows = scheme.embed(x, start)
            source_rows = rows if context is None else scheme.embed(source, 0)
        if without_queries:
            keys, values = self.project_keys(x)
            queries = keys.new_empty(()).expand(*x.shape[:2], self.num_heads * self.head_dim)
            flat = (queries, keys, values)
        else:
            flat = self.project_flat(rows, source_rows, source)
        if conv is not None and self.conv_on == "qkv":
            together, conv_state = conv(torch.cat(flat, -1), **mixed)
            flat = together.split(self.projection_widths(), -1)
        q, k, v = self.split_heads(*flat, batched=True)
        if self.q_norm is not None and not without_queries:
            q = _normed(q, self.q_norm).to(v.dtype)
        if self.k_norm is not None:
            k = _normed(k, self.k_norm).to(v.dtype)
        if self.mechanism.traits.shared_qk:
            k = q
        if scheme is not None:
            q, k = scheme.encode(q, k, start, key_start)
        controls = {name: project(source).mT for name, project in self.controls.items()}
        return Projected(q, k, v, controls, x, conv_state)

    def _queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The queries `[B, H, T, D]` of a layer without positions, from the input of its gate."""
        q = self._split(self.project_queries(x), self.head_dim, True)
        return q if self.q_norm is None else _normed(q, self.q_norm).to(dtype)

    def _attend(self, made: Projected, **about: Any) -> tuple[Tensor, Any]:
        """The output of the mechanism and its state, for these arguments of its `forward`."""
        v = self.drop_keys(made.v)
        found: tuple[Tensor, Any] = self.mechanism(
            made.q, made.k, v, controls=made.controls, **about
        )
        return found

    def _gated(self, x: Tensor) -> Tensor | None:
        """The gate by which the heads are multiplied, `[B, H, T, V]`; None without a gate."""
        if self.gate is None:
            return None
        gate: Tensor = GATES[self.gate_kind](self.gate(x)).unflatten(-1, (self.num_heads, -1))
        return gate.transpose(1, 2)

    def _finish(self, out: Tensor, gate: Tensor | None) -> Tensor:
        """The heads `[B, H, T, V]` through norm, gate and output projection."""
        if self.norm is not None:
            out = _normed(out, self.norm)
        return self.merge_heads(out if gate is None else out * gate, batched=True)


def check_gate(gate: bool | str) -> str:
    """The name of a gate; "" for none."""
    if isinstance(gate, bool):
        return "silu" if gate else ""
    if not isinstance(gate, str):
        raise TypeError(f"gate must be a bool, silu or sigmoid, got {type(gate).__name__}")
    return check_choice("gate", gate, GATES)


def check_conv_on(conv: int, conv_on: str) -> None:
    check_choice("conv_on", conv_on, CONVOLVED)
    if conv_on != "qkv" and not conv:
        raise ValueError(f"conv_on must be left as 'qkv' with conv=0, got {conv_on!r}")


def _normed(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    out: Tensor = norm(x.to(norm.weight.dtype))  # autocast may have rounded x, not the weights
    return out


def _begin(project: nn.Linear, bias: Tensor | None) -> nn.Linear:
    """Start a projection with weights of 0 and this bias; with None leave it as it was drawn."""
    if bias is not None:
        with torch.no_grad():
            project.weight.zero_()
            project.bias.copy_(bias)
    return project
