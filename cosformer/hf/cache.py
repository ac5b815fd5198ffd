"""Caches of Transformers that hold streams: their size does not depend on how long a text is."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

import cosformer.ops as ops
from cosformer.mechanisms import map_streams
from cosformer.models import Backbone


class StreamLayer(CacheLayerMixin):
    """What streams remember, one for each row of a batch, where Transformers keeps keys and values.

    Tokens cannot be taken back, because sums do not say what they were made of.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise TypeError(f"{type(self).__name__} takes tokens, not keys and values")

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A mask is needed for the new tokens alone, which stand after `length` others."""
        return query_length, self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"tokens_to_remove must be 0 for {type(self).__name__}, which remembers sums and "
                f"cannot take tokens back, got {tokens_to_remove}: assisted decoding needs "
                "transformers.DynamicCache"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each_row(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each_row(lambda x: x.repeat_interleave(repeats, 0))

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every tensor whose first dimension is the batch; a position may have none."""
        self.state = map_streams(lambda x: change(x) if x.dim() else x, self.state)


class AttentionStream(StreamLayer):
    """The stream through one attention layer of a model of Transformers'.

    `update` gives the new keys and values back, and `attend`, which the attention function calls
    with them, takes them into the sums.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.is_waiting:
            raise ValueError(
                "past_key_values must not be a CosformerCache unless attn_implementation is "
                "cosformer or cosformer-multiscale and the model hands keys on as its cache gives "
                "them: the last keys were not attended to"
            )
        self.is_waiting = self.is_initialized = True
        self.length += key_states.shape[2]
        keys = key_states.view_as(key_states)  # a tensor of our own, to carry the stream
        setattr(keys, CARRIED, self)
        return keys, value_states

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, weights: dict[str, Any]
    ) -> Tensor:
        """Causal attention of the new tokens; `weights` are the horizon and the decay."""
        if not self.is_waiting:
            raise ValueError(
                "past_key_values must not be a CosformerCache for a layer that attends to the same "
                "keys twice, as DiffLlama's: they would be added twice"
            )
        self.is_waiting = False
        one = k.shape[2] == 1 and key_mask is None and self.state is not None
        if one and not _records(q, k, v):
            return ops.step(q, k, v, self.state)
        given = weights if self.state is None else {"state": self.state}
        out, self.state = ops.attention_with_state(q, k, v, key_mask=key_mask, **given)
        return out

    def reset(self) -> None:
        super().reset()
        self.is_waiting = False


class CosformerCache(Cache):
    """The cache of `generate` for a model with `attn_implementation="cosformer"`.

    Its size does not depend on the number of tokens, and neither does the time of a token:

        model.generate(tokens, past_key_values=CosformerCache())
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=AttentionStream)


class ModelCache(Cache):
    """The cache of a native model: the state of the streams through all its layers."""

    def __init__(self) -> None:
        super().__init__(layers=[StreamLayer()])

    def read(
        self,
        backbone: Backbone,
        tokens: Tensor,
        key_mask: Tensor | None,
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        """Vectors `[B, T, width]` of the next tokens, as `Backbone.stream` takes and gives them."""
        stream = cast(StreamLayer, self.layers[0])
        one = tokens.shape[1] == 1 and key_mask is None and stream.state is not None
        if one and hidden is None and not _records(backbone.embedding.weight, tokens):
            backbone.check_step(tokens, stream.state)
            x, state = backbone.step(tokens, stream.state)
        else:
            x, state = backbone.stream(tokens, stream.state, key_mask=key_mask, hidden=hidden)
        stream.state, stream.length = state, state.length
        return x


CARRIED = "cosformer_stream"
"""The attribute by which keys say which stream they belong to."""


def stream_of(keys: Tensor) -> AttentionStream | None:
    """The stream of keys that a `CosformerCache` gave; None for other keys."""
    found: AttentionStream | None = getattr(keys, CARRIED, None)
    return found


def _records(*tensors: Tensor) -> bool:
    """Whether gradients will be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
