"""The causal language model: what comes next, for a whole sequence or token by token."""

from typing import Any, cast

import torch
from torch import Tensor

from cosformer.models.backbone import ModelState, TokenModel
from cosformer.models.config import ModelConfig
from cosformer.nn import AttentionLayer, Block
from cosformer.runtime import compute_dtype


class LanguageModel(TokenModel):
    """Tokens `[B, T]` to logits `[B, T, vocabulary]` of the token after each.

    >>> model = LanguageModel(ModelConfig(max_length=4096))
    >>> tokens = torch.randint(256, (1, 100))
    >>> logits = model(tokens)
    >>> first, state = model.stream(tokens[:, :99])  # the same in two pieces
    >>> last, state = model.stream(tokens[:, 99:], state)
    >>> torch.allclose(logits[:, 99:], last, atol=1e-5)
    True
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, causal=True)

    def empty_state(self, batch: int) -> ModelState:
        """The state before the first token of so many streams."""
        return self.backbone.empty_state(batch)

    def stream(
        self, tokens: Tensor, state: ModelState | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Logits after each of the next tokens `[B, T]`, and the state after them.

        A state of None begins a stream; the given state is not changed. key_mask: padding may
        stand only before the first real token.
        """
        x, state = self.backbone.stream(tokens, state, key_mask=key_mask)
        return self.head(x), state

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Logits `[B, 1, vocabulary]` after one more token `[B, 1]`, and the state after it.

        For inference, under ``torch.no_grad()``. The given state is used up, because its tensors
        may change in place: go on with the returned one.
        """
        self.backbone.check_step(tokens, state)
        x, state = self.backbone.step(tokens, state)
        return self.head(x), state

    def stream_memory(self, length: int) -> dict[str, int]:
        """Bytes that one stream remembers after so many tokens, by the mechanism that needs them.

        `conv` is what short convolutions remember, in all layers together.

        >>> model = LanguageModel(ModelConfig(layers=3, mechanism="cosformer*2 softmax"))
        >>> model.stream_memory(1000)
        {'cosformer': 33792, 'softmax': 512000}
        """
        found: dict[str, int] = {}
        dtype = self.head.weight.dtype
        for name, layer in zip(self.config.mechanisms, self._layers, strict=True):
            inner, conv = layer.mechanism, layer.conv
            kept = compute_dtype(dtype) if inner.traits.state == "constant" else dtype
            found[name] = found.get(name, 0) + inner.state_size(length) * kept.itemsize
            if conv is not None:
                inputs = (conv.width - 1) * conv.columns
                found["conv"] = found.get("conv", 0) + inputs * dtype.itemsize
        return found

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor) -> list[Tensor]:
        """The exact weights by which heads read the tokens `[B, T]`: one `[B, H, T, T]` a layer.

        A row for each token, a column for each token that it looks at. Quadratic, for pictures.

        >>> model = LanguageModel(ModelConfig(layers=2, heads=4))
        >>> [weights.shape for weights in model.attention_weights(torch.arange(9)[None])]
        [torch.Size([1, 4, 9, 9]), torch.Size([1, 4, 9, 9])]
        """
        found: list[Tensor] = []

        def keep(layer: AttentionLayer, given: Any, options: Any) -> None:
            found.append(layer.weights(*given, **options))

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._layers]
        try:
            self(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    @property
    def _layers(self) -> list[AttentionLayer]:
        return [cast(Block, block).attention for block in self.backbone.blocks]
