"""Native models: `cosformer.models` behind the classes of Transformers."""

import dataclasses
import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from cosformer.check import check_whole
from cosformer.hf.adapt import adapted
from cosformer.hf.cache import ModelCache
from cosformer.hf.config import CosformerConfig
from cosformer.models import EMBEDDING_STD, Backbone, Kind, class_head, pool

TIED = {"lm_head.weight": "model.backbone.embedding.weight"}
"""The parameter that is tied -> the one that it is, where the config ties them."""


class CosformerPreTrainedModel(PreTrainedModel):
    """What the native models share."""

    config: CosformerConfig
    config_class = CosformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # assisted decoding, which takes tokens back, is refused by its name
    _no_split_modules = ["ModelBlock"]  # noqa: RUF012
    accepts_loss_kwargs = True  # Trainer then says how many labels a whole batch has
    kind: Kind | None = None

    def __init__(self, config: CosformerConfig) -> None:
        super().__init__(config)
        self.set_attn_implementation(config._attn_implementation)
        config.model_config(self.kind)  # refuses the config of another kind

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str] | None, allow_all_kernels: bool = False
    ) -> None:
        """Refuse all but `eager`, as Transformers calls the only attention that there is."""
        if attn_implementation not in (None, "eager"):
            raise ValueError(
                "attn_implementation must not be given for a Cosformer model, whose attention is "
                f"the config's mechanism, got {attn_implementation!r}"
            )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """`from_pretrained` of Transformers; refuses a model with weights that lie on no device."""
        made = super().from_pretrained(*args, **kwargs)
        model = made[0] if isinstance(made, tuple) else made
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    "device_map must keep all weights of a Cosformer model on their devices, "
                    f"because streams read them outside of modules, got {name} offloaded"
                )
        return made

    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
        """Contexts without the device meta, on which parameters have no numbers: some mechanisms
        read their numbers while they are made."""
        contexts = super().get_init_context(*args, **kwargs)
        meta = torch.device("meta")
        return [each for each in contexts if not (isinstance(each, torch.device) and each == meta)]

    def _move_missing_keys_from_meta_to_device(
        self, missing_keys: list[str], *args: Any, **kwargs: Any
    ) -> None:
        """What a checkpoint lacks, such as a new head, keeps the numbers that it was made with."""
        names = set(missing_keys) - self.all_tied_weights_keys.keys()
        names |= {name for name, _ in self.named_non_persistent_buffers()}
        made = {name: self.get_parameter_or_buffer(name).detach().clone() for name in names}
        super()._move_missing_keys_from_meta_to_device(missing_keys, *args, **kwargs)
        with torch.no_grad():
            for name, x in made.items():
                self.get_parameter_or_buffer(name).copy_(x)

    def get_input_embeddings(self) -> nn.Embedding:
        return self._backbone.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        backbone = self._backbone
        backbone.embedding = value
        backbone.config = dataclasses.replace(backbone.config, vocabulary=value.num_embeddings)

    @property
    def _backbone(self) -> Backbone:
        return cast(Backbone, self.base_model.backbone)

    def _finish(self) -> None:
        """Tell Transformers that all parameters have their first numbers."""
        for module in self.modules():
            setattr(module, "_is_hf_initialized", True)  # noqa: B010
        self.post_init()


class CosformerModel(CosformerPreTrainedModel):
    """Tokens to vectors: a `cosformer.models.Backbone`, causal or not as the config says."""

    def __init__(self, config: CosformerConfig) -> None:
        super().__init__(config)
        self.backbone = adapted(Backbone(config.model_config(), causal=config.causal))
        self._finish()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ModelCache | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Vectors `[B, T, hidden_size]`.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 for real tokens; with a cache it may cover the tokens
                before too. With a cache padding stands on the left.
            past_key_values: the cache that an earlier call returned; it goes on from there.
            use_cache: whether to return a cache; not by default.
            inputs_embeds: vectors `[B, T, hidden_size]` in place of `input_ids`.
            output_attentions: refused, because weights are never formed.
            output_hidden_states: whether to return what goes into the first block and what comes
                out of each, the last of which is `last_hidden_state`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids or inputs_embeds must be given, got {given}")
        tokens = cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        if self._asks("output_attentions", output_attentions):
            raise ValueError("output_attentions must be False for a Cosformer model, got True")
        hidden: list[Tensor] | None = None
        if self._asks("output_hidden_states", output_hidden_states):
            hidden = []
        mask = self._key_mask(attention_mask, tokens.shape[1], past_key_values)
        cache = None
        if past_key_values is None and not use_cache:
            x: Tensor = self.backbone(tokens, mask, hidden=hidden)
        else:
            cache = self._cache(past_key_values)
            if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
                mask = None
            x = cache.read(self.backbone, tokens, mask, hidden)
        states = None if hidden is None else (*hidden[:-1], x)
        return BaseModelOutputWithPast(
            last_hidden_state=cast(Any, x), past_key_values=cache, hidden_states=cast(Any, states)
        )

    def _key_mask(
        self, attention_mask: Tensor | None, length: int, past_key_values: ModelCache | None
    ) -> Tensor | None:
        """The mask `[B, T]` of the new tokens, so many, True = real token."""
        if attention_mask is None:
            return None
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        if attention_mask.dim() != 2 or attention_mask.shape[1] not in (length, before + length):
            raise ValueError(
                f"attention_mask must be [batch, length], 1 for real tokens, of {length} tokens "
                f"after {before} others, got {list(attention_mask.shape)}"
            )
        return attention_mask[:, attention_mask.shape[1] - length :].bool()

    def _asks(self, name: str, given: bool | None) -> bool:
        return bool(getattr(self.config, name) if given is None else given)

    def _cache(self, given: ModelCache | None) -> ModelCache:
        if not self.config.causal:
            raise ValueError("use_cache must be False for a model that is not causal, got True")
        cache = ModelCache() if given is None else given
        if not isinstance(cache, ModelCache):
            raise TypeError(f"past_key_values must be a ModelCache, got {type(cache).__name__}")
        return cache


class CosformerTokenModel(CosformerPreTrainedModel):
    """What the models of tokens share: a head whose weights may be those of the embedding."""

    _tied_weights_keys = TIED

    def __init__(self, config: CosformerConfig) -> None:
        super().__init__(config)
        self.model = CosformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=EMBEDDING_STD)
        self._finish()

    def _loss(
        self, logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None
    ) -> Any:
        if labels is None:
            return None
        size, items = self.config.vocab_size, num_items_in_batch
        return self.loss_function(logits, labels, vocab_size=size, num_items_in_batch=items)


class CosformerForCausalLM(CosformerTokenModel, GenerationMixin):
    """Tokens to logits of the token after each: a `cosformer.models.LanguageModel`."""

    kind: Kind = "decoder"

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a call with use_cache makes a ModelCache

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # its signature is read
    def prepare_inputs_for_generation(  # type: ignore[override]  # it differs between versions
        self, *args: Any, **given: Any
    ) -> dict[str, Any]:
        """Without the tokenizer, which `generate` takes for stop strings and hands on."""
        given.pop("tokenizer", None)
        found: dict[str, Any] = super().prepare_inputs_for_generation(*args, **given)  # type: ignore[misc]
        return found

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ModelCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **given: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab_size]`, and the loss where labels are given.

        Args:
            labels: `[B, T]`, the tokens themselves; -100 is not asked for.
            logits_to_keep: logits of the last so many tokens alone, or of these positions; 0: all.
            num_items_in_batch: labels by which the sum of losses is divided, where a batch comes in
                several calls; those of this call if not given.
            input_ids, attention_mask, past_key_values, use_cache, inputs_embeds, given: as in
                `CosformerModel`.
        """
        if isinstance(logits_to_keep, int):
            check_whole("logits_to_keep", logits_to_keep, 0)
        found = self.model(
            input_ids, attention_mask, past_key_values, use_cache, inputs_embeds, **given
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(
            loss=self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
        )


class CosformerForMaskedLM(CosformerTokenModel):
    """Tokens to logits of each, from both sides: a `cosformer.models.MaskedLanguageModel`."""

    kind: Kind = "masked-lm"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **given: Any,
    ) -> MaskedLMOutput:
        """Logits `[B, T, vocab_size]`, and the loss where labels `[B, T]` are not -100.

        Other arguments are as in `CosformerModel`.
        """
        found = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **given)
        logits = self.lm_head(found.last_hidden_state)
        loss = self._loss(logits, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)


class CosformerForSequenceClassification(CosformerPreTrainedModel):
    """A sequence to logits of classes: a `cosformer.models.Classifier`."""

    kind: Kind = "classifier"
    accepts_loss_kwargs = False  # every row has one label

    def __init__(self, config: CosformerConfig) -> None:
        super().__init__(config)
        self.model = CosformerModel(config)
        self.score = class_head(config.model_config("classifier"), config.hidden_size)
        self._finish()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **given: Any,
    ) -> SequenceClassifierOutput:
        """Logits `[B, num_labels]`, and the loss of labels `[B]` by the config's problem_type.

        Other arguments are as in `CosformerModel`.
        """
        found = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **given)
        mask = None if attention_mask is None else attention_mask.bool()
        logits = self.score(pool(found.last_hidden_state, mask, self.config.pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)
