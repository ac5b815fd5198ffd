"""The encoder-decoder: a bidirectional stack reads a source, a causal one looks at it."""

from torch import Tensor, nn

from cosformer.mechanisms import real_first
from cosformer.models.backbone import Backbone, Context, ModelState, TokenHead, check_model_state
from cosformer.models.config import ModelConfig


class EncoderDecoder(nn.Module):
    """Sources `[B, S]` and targets `[B, T]` to logits `[B, T, vocabulary]` of the token after each.

    Both sides share one embedding, and the output layer too if tied.

    >>> model = EncoderDecoder(ModelConfig(kind="encoder-decoder"))
    >>> source, tokens = torch.randint(256, (1, 30)), torch.randint(256, (1, 20))
    >>> logits = model(source, tokens)
    >>> state = model.empty_state(source)  # the state of a stream holds the source it looks at
    >>> first, state = model.stream(tokens[:, :19], state)
    >>> last, state = model.stream(tokens[:, 19:], state)
    >>> torch.allclose(logits[:, 19:], last, atol=1e-5)
    True
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
        logits: Tensor = self.head(self.backbone(tokens, key_mask, self.read(source, source_mask)))
        return logits

    def read(self, source: Tensor, source_mask: Tensor | None = None) -> Context:
        """Encode the source, with its real tokens first."""
        self.encoder.check_tokens("source", source, source_mask)
        if source_mask is None:
            return Context(self.encoder(source), None)
        order = real_first(source_mask)  # cross attention compares positions: padding goes last
        source, mask = source.gather(1, order), source_mask.gather(1, order)
        return Context(self.encoder(source, mask), mask)

    def empty_state(self, source: Tensor, source_mask: Tensor | None = None) -> ModelState:
        """The state before the first target token; it holds the encoded source."""
        return self.backbone.empty_state(len(source), self.read(source, source_mask))

    def stream(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Logits after each of the next tokens `[B, T]`, and the state after them.

        The given state, at first from `empty_state`, is not changed. Every token looks at the whole
        source, so that its time grows with the source alone.
        """
        check_model_state(state, tokens, len(self.backbone.blocks))
        x, state = self.backbone.stream(tokens, state)
        return self.head(x), state

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Logits `[B, 1, vocabulary]` after one more token `[B, 1]`, and the state after it.

        For inference, under ``torch.no_grad()``. The given state is used up, because its tensors
        may change in place: go on with the returned one.
        """
        self.backbone.check_step(tokens, state)
        x, state = self.backbone.step(tokens, state)
        return self.head(x), state
