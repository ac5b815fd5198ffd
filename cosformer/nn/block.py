"""The block that models are stacked from: attention and feed-forward, each normed before."""

import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.check import check_bool, check_dropout
from cosformer.nn.multihead import LayerState, MultiHeadAttention


class FeedForward(nn.Module):
    """down(gelu(up x)), or with `glu` down(silu(gate x) ⊙ up x), at every token by itself."""

    def __init__(self, width: int, hidden: int, *, glu: bool = False) -> None:
        super().__init__()
        check_bool("glu", glu)
        self.gate = nn.Linear(width, hidden) if glu else None
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """x + attention(norm x), then + cross attention to a context if there is one, then + ff.

    Args:
        attention: the layer over the tokens themselves.
        feed_forward: any module `[B, T, E]` -> `[B, T, E]`.
        cross: the layer from the tokens to a context; None for a block without.
        dropout: of what each part adds to x, in training.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: nn.Module,
        cross: MultiHeadAttention | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = attention.embed_dim
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

    def stream(
        self,
        x: Tensor,
        state: LayerState | None = None,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """The next tokens `[B, T, E]` of a causal stream; a state of None begins one."""
        start = 0 if state is None else state.position
        out, after = self.attention.stream(self.attention_norm(x), state, key_mask=key_mask)
        x = x + self.dropout(out)
        return self._after_attention(x, context, context_mask, start), after

    def _after_attention(
        self, x: Tensor, context: Tensor | None, context_mask: Tensor | None, start: int
    ) -> Tensor:
        if (context is None) != (self.cross is None):
            rule = "not be given to a block without" if self.cross is None else "be given to one of"
            got = "None" if context is None else list(context.shape)
            raise ValueError(f"context must {rule} cross attention, got {got}")
        if context_mask is not None and context is None:
            raise ValueError("context_mask must be None without a context")
        if self.cross is not None and self.cross_norm is not None:
            seen = self.cross(self.cross_norm(x), context, key_mask=context_mask, start=start)
            x = x + self.dropout(seen)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
