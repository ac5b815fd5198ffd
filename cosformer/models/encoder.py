"""Bidirectional models: what a masked token was, and which class a sequence or a pair is of."""

import torch
from torch import Tensor, nn

from cosformer.models.backbone import Backbone
from cosformer.models.config import ModelConfig
from cosformer.models.heads import TokenHead, class_head


class MaskedLanguageModel(nn.Module):
    """Tokens `[B, T]` to logits `[B, T, vocabulary]`, each from all tokens around it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, causal=False)
        self.head = TokenHead(config, self.backbone.embedding)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """key_mask `[B, T]` bool: True = real token."""
        logits: Tensor = self.head(self.backbone(tokens, key_mask))
        return logits


class Classifier(nn.Module):
    """Tokens `[B, T]` to logits `[B, classes]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, causal=False)
        self.head = class_head(config, config.width)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """key_mask `[B, T]` bool: True = real token."""
        logits: Tensor = self.head(pooled(self.backbone, tokens, key_mask))
        return logits


class PairClassifier(nn.Module):
    """Two sequences to logits `[B, classes]`: one encoder reads both, the head [a, b, a·b, a−b]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, causal=False)
        self.head = class_head(config, 4 * config.width)

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
    ) -> Tensor:
        """Tokens `[B, T]` and `[B, S]`, masks alike."""
        if len(first) != len(second):
            raise ValueError(
                f"second must have the batch of first, {len(first)}, got {len(second)}"
            )
        a = pooled(self.backbone, first, first_mask)
        b = pooled(self.backbone, second, second_mask)
        logits: Tensor = self.head(torch.cat([a, b, a * b, a - b], -1))
        return logits


def pooled(backbone: Backbone, tokens: Tensor, key_mask: Tensor | None) -> Tensor:
    """One vector `[B, width]` a sequence, as the config says; of one without tokens, zeros."""
    x: Tensor = backbone(tokens, key_mask)
    if backbone.config.pooling == "cls":
        return x[:, 0]
    real = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask
    if backbone.config.pooling == "first":
        real = real & (real.cumsum(1) == 1)
    kept = torch.where(real[..., None], x, 0)  # not x · mask: a masked vector may be anything
    return kept.sum(1) / real.sum(1, keepdim=True).clamp(min=1)
