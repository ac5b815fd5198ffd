"""Models that see both sides of a token: masked tokens, classes of a sequence or of a pair."""

import torch
from torch import Tensor, nn

from cosformer.models.backbone import EMBEDDING_STD, Backbone, TokenModel, every_token
from cosformer.models.config import ModelConfig


class MaskedLanguageModel(TokenModel):
    """Tokens `[B, T]` to logits `[B, T, vocabulary]`, each from all tokens around it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, causal=False)


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
    """Two sequences to logits `[B, classes]`.

    One encoder reads both; from their vectors a and b the head reads [a, b, a·b, a−b].
    """

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
        """Tokens `[B, T]` and `[B, S]`; masks of the same shapes, bool, True = real token."""
        if len(first) != len(second):
            raise ValueError(
                f"second must have the batch of first, {len(first)}, got {len(second)}"
            )
        a = pooled(self.backbone, first, first_mask)
        b = pooled(self.backbone, second, second_mask)
        logits: Tensor = self.head(torch.cat([a, b, a * b, a - b], -1))
        return logits


def pooled(backbone: Backbone, tokens: Tensor, key_mask: Tensor | None) -> Tensor:
    """One vector per sequence, `[B, width]`, by the config's pooling; zeros if all is padding."""
    if backbone.split is not None:
        raise ValueError(
            "a model that is split over ranks must have an output for each token: one vector of a "
            "whole sequence needs the tokens of all ranks"
        )
    return pool(backbone(tokens, key_mask), key_mask, backbone.config.pooling)


def pool(x: Tensor, key_mask: Tensor | None, pooling: str) -> Tensor:
    """One vector per sequence, `[B, width]`, of those that a backbone gave."""
    if pooling == "cls":
        return x[:, 0]
    real = every_token(x) if key_mask is None else key_mask
    if pooling == "first":
        real = real & (real.cumsum(1) == 1)
    kept = torch.where(real[..., None], x, 0)  # not x · mask: a masked vector may be anything
    return kept.sum(1) / real.sum(1, keepdim=True).clamp(min=1)


def class_head(config: ModelConfig, width: int) -> nn.Module:
    """Vectors `[B, width]` to logits `[B, classes]` through one hidden layer."""
    if config.classes is None:
        raise ValueError(f"kind must be one that gives classes, got {config.kind!r}")
    last = nn.Linear(config.width, config.classes)
    nn.init.normal_(last.weight, std=EMBEDDING_STD)
    nn.init.zeros_(last.bias)
    dropout = nn.Dropout(config.dropout)
    return nn.Sequential(nn.Linear(width, config.width), nn.GELU(), dropout, last)
