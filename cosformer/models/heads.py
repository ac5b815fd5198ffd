"""What stands on a backbone: logits over the vocabulary, or over classes."""

import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.models.backbone import EMBEDDING_STD
from cosformer.models.config import ModelConfig


class TokenHead(nn.Module):
    """Vectors `[..., width]` to logits `[..., vocabulary]`, by the embedding itself if tied."""

    def __init__(self, config: ModelConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        if config.tied:
            self.weight = embedding.weight
        else:
            self.weight = nn.Parameter(embedding.weight.detach().clone())
            nn.init.normal_(self.weight, std=EMBEDDING_STD)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def class_head(config: ModelConfig, width: int) -> nn.Module:
    """A hidden layer and the classes."""
    assert config.classes is not None  # by the config
    last = nn.Linear(config.width, config.classes)
    nn.init.normal_(last.weight, std=EMBEDDING_STD)
    nn.init.zeros_(last.bias)
    dropout = nn.Dropout(config.dropout)
    return nn.Sequential(nn.Linear(width, config.width), nn.GELU(), dropout, last)
