"""The encoder–decoder: a bidirectional stack reads a source, a causal one looks at it."""

from typing import NamedTuple

from torch import Tensor, nn

from cosformer.mechanisms import real_first
from cosformer.models.backbone import Backbone, ModelState
from cosformer.models.config import ModelConfig
from cosformer.models.heads import TokenHead


class Source(NamedTuple):
    """What the decoder looks at: a source that has been read, its real tokens first."""

    vectors: Tensor  # [B, S, width]
    key_mask: Tensor | None  # [B, S]


class EncoderDecoder(nn.Module):
    """Sources `[B, S]` and targets `[B, T]` to logits `[B, T, vocabulary]` of the token after each.

    Both sides share one embedding, and the output layer too if tied.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Backbone(config, causal=False)
        self.backbone = Backbone(config, causal=True, cross=True)
        self.encoder.embedding = self.backbone.embedding
        self.head = TokenHead(config, self.backbone.embedding)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        source_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Masks `[B, S]` and `[B, T]` bool: True = real token; padding may stand anywhere."""
        logits: Tensor = self.head(self.backbone(tokens, key_mask, *self.read(source, source_mask)))
        return logits

    def read(self, source: Tensor, source_mask: Tensor | None = None) -> Source:
        """Encode the source; once for all tokens that are then generated from it."""
        self.encoder.check_tokens("source", source, source_mask)
        if source_mask is None:
            return Source(self.encoder(source), None)
        order = real_first(source_mask)  # cross attention compares positions: padding goes last
        source, mask = source.gather(1, order), source_mask.gather(1, order)
        return Source(self.encoder(source, mask), mask)

    def stream(
        self, source: Source, tokens: Tensor, state: ModelState | None = None
    ) -> tuple[Tensor, ModelState]:
        """Logits after each of the next tokens `[B, T]`, and the state, which is not changed.

        Every token looks at the whole source, so that its time grows with the source alone.
        """
        x, state = self.backbone.stream(tokens, state, None, *source)
        return self.head(x), state
