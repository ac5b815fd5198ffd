"""The causal language model: what comes next, for a whole sequence or token by token."""

from torch import Tensor, nn

from cosformer.models.backbone import Backbone, ModelState
from cosformer.models.config import ModelConfig
from cosformer.models.heads import TokenHead


class LanguageModel(nn.Module):
    """Tokens `[B, T]` to logits `[B, T, vocabulary]` of the token after each.

    >>> model = LanguageModel(ModelConfig(max_length=4096))
    >>> tokens = torch.randint(256, (1, 100))
    >>> logits = model(tokens)
    >>> first, state = model.stream(tokens[:, :99])  # the same in two stretches
    >>> last, state = model.stream(tokens[:, 99:], state)
    >>> torch.allclose(logits[:, 99:], last, atol=1e-5)
    True
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, causal=True)
        self.head = TokenHead(config, self.backbone.embedding)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """key_mask `[B, T]` bool: True = real token; padding may stand anywhere."""
        logits: Tensor = self.head(self.backbone(tokens, key_mask))
        return logits

    def stream(
        self, tokens: Tensor, state: ModelState | None = None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Logits after each of the next tokens `[B, T]`, and the state, which is not changed.

        key_mask: padding may stand before the first tokens alone.
        """
        x, state = self.backbone.stream(tokens, state, key_mask)
        return self.head(x), state
