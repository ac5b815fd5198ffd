"""The block that models are stacked from: attention and feed-forward, each after a norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_bool, check_dropout, check_whole
from cosformer.nn.layer import AttentionLayer, LayerState


class FeedForward(nn.Module):
    """down(gelu(up x)), or with `glu` down(silu(gate x) ⊙ up x), for every token by itself."""

    def __init__(self, width: int, hidden: int, *, glu: bool = False) -> None:
        super().__init__()
        check_bool("glu", glu)
        for name, size in (("width", width), ("hidden", hidden)):
            check_whole(name, size, 1)
        self.gate = nn.Linear(width, hidden) if glu else None
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """Adds to x, in turn: attention(norm x), cross attention to a context, feed_forward(norm x).

    Args:
        attention: the layer over the tokens themselves.
        feed_forward: any module `[B, T, E]` -> `[B, T, E]`.
        cross: the layer from the tokens to a context; None for a block without cross attention.
        dropout: the share that is dropped, in training, of what each part adds to x.
    """

    def __init__(
        self,
        attention: AttentionLayer,
        feed_forward: nn.Module,
        cross: AttentionLayer | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers = {"attention": attention} | ({} if cross is None else {"cross": cross})
        for name, layer in layers.items():
            if not isinstance(layer, AttentionLayer):
                raise TypeError(f"{name} must be an AttentionLayer, got {type(layer).__name__}")
        width = attention.embed_dim
        if cross is not None and cross.embed_dim != width:
            raise ValueError(
                f"cross must have embed_dim={width}, as attention, got {cross.embed_dim}"
            )
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.cross_norm = None if cross is None else nn.LayerNorm(width)
        self.cross = cross
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(check_dropout(dropout))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """x `[B, T, E]`, a context `[B, S, C]`; masks `[B, T]` and `[B, S]`, True = real token."""
        x = x + self.dropout(
            self.attention(self.attention_norm(x), causal=causal, key_mask=key_mask)
        )
        return self._after_attention(x, context, context_mask, 0)

    def empty_state(self, batch: int) -> LayerState:
        """The state before the first token of so many streams."""
        return self.attention.empty_state(batch)

    def stream(
        self,
        x: Tensor,
        state: LayerState | None = None,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """The next tokens `[B, T, E]` of a causal stream, and the state after them.

        A state of None begins a stream; the given state is not changed.
        """
        out, after = self.attention.stream(self.attention_norm(x), state, key_mask=key_mask)
        start = after.position - x.shape[1]
        x = x + self.dropout(out)
        return self._after_attention(x, context, context_mask, start), after

    def step(
        self,
        x: Tensor,
        state: LayerState,
        context: Tensor | None = None,
        *,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """One more token `[B, 1, E]` of a causal stream, and the state after it; for inference.

        The given state is used up: go on with the returned one.
        """
        self.attention.check_step(x, state)
        return self.take_step(x, state, context, context_mask=context_mask)

    def take_step(
        self,
        x: Tensor,
        state: LayerState,
        context: Tensor | None = None,
        *,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """`step` for callers that have checked x and the state, as models have."""
        out, after = self.attention.take_step(self.attention_norm(x), state)
        x = x + self.dropout(out)
        return self._after_attention(x, context, context_mask, state.position), after

    def _after_attention(
        self, x: Tensor, context: Tensor | None, context_mask: Tensor | None, start: int | Tensor
    ) -> Tensor:
        """x with cross attention and feed-forward added; its first token stands at `start`."""
        if self.cross is None and context is not None:
            raise ValueError(
                "context must be None for a block without cross attention, "
                f"got {list(context.shape)}"
            )
        if self.cross is not None and context is None:
            raise ValueError("context must be given to a block with cross attention, got None")
        if context is not None and self.cross_norm is not None:
            x = x + self.dropout(self._look(self.cross_norm(x), context, context_mask, start))
        elif context_mask is not None:
            raise ValueError("context_mask must be None without a context")
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def _look(self, x: Tensor, context: Tensor, mask: Tensor | None, start: int | Tensor) -> Tensor:
        """Cross attention of x; streams that stand at the same position are computed together."""
        assert self.cross is not None
        if not isinstance(start, Tensor):
            out: Tensor = self.cross(x, context, key_mask=mask, start=start)
            return out
        seen = torch.empty_like(x)
        for first in start.unique().tolist():
            rows = start == first
            real = None if mask is None else mask[rows]
            seen[rows] = self.cross(x[rows], context[rows], key_mask=real, start=first)
        return seen
