"""The config of native models: `ModelConfig` under the names that Transformers' tools know."""

import dataclasses
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from cosformer.models import Kind, ModelConfig

DEFAULT = ModelConfig()
NAMES = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "max_length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "classes": "num_labels",
}
"""Field of `ModelConfig` -> its name here, where it is another one."""


class CosformerConfig(PreTrainedConfig):
    """A model of `cosformer.models` for Transformers.

    Fields mean what they mean in `cosformer.models.ModelConfig`, whose names are known too, except
    for `max_length`, which `generate` has taken. `causal` says whether it is a decoder.

    >>> config = CosformerConfig(hidden_size=64, mechanism="cosformer*5 softmax", layers=6)
    >>> config.model_config("decoder").layers
    6
    """

    model_type = "cosformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        ours: theirs for ours, theirs in NAMES.items() if ours != "max_length"
    }

    causal: bool = True
    vocab_size: int = DEFAULT.vocabulary
    num_hidden_layers: int = DEFAULT.layers
    hidden_size: int = DEFAULT.width
    num_attention_heads: int = DEFAULT.heads
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    intermediate_size: int | None = None
    mechanism: str = DEFAULT.mechanism
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_position_embeddings: int = DEFAULT.max_length
    positions: str = DEFAULT.positions
    conv: int = 0
    conv_on: str = DEFAULT.conv_on
    gate: bool | str = False
    norm: bool | None = None
    qk_norm: bool = False
    glu: bool = False
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    pooling: str = DEFAULT.pooling
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if "max_length" in kwargs:
            raise ValueError(
                "max_length is called max_position_embeddings in a CosformerConfig, "
                f"got {kwargs['max_length']}"
            )
        super().__post_init__(**kwargs)
        self.model_config()  # refuses what cannot be built

    @classmethod
    def of(cls, config: ModelConfig) -> "CosformerConfig":
        """The config of a decoder, a masked language model or a classifier."""
        if config.kind not in ("decoder", "masked-lm", "classifier"):
            raise ValueError(
                "kind must be decoder, masked-lm or classifier to be a model of Transformers', "
                f"got {config.kind!r}"
            )
        given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        given["options"] = dict(config.options)
        if given.pop("classes") is not None:
            given["classes"] = config.classes
        causal = given.pop("kind") == "decoder"
        return cls(causal=causal, **{NAMES.get(name, name): x for name, x in given.items()})

    def model_config(self, kind: Kind | None = None) -> ModelConfig:
        """The config of `cosformer.models`; a `kind` of None is that of a bare `CosformerModel`."""
        kind = kind or ("decoder" if self.causal else "classifier")
        if self.causal != (kind == "decoder"):
            raise ValueError(f"causal must be {not self.causal} for a {kind}, got {self.causal}")
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        given = {name: getattr(self, NAMES.get(name, name)) for name in names if name != "kind"}
        if kind == "classifier":
            given["tied"] = True
        else:
            given["classes"] = None
        return ModelConfig(kind=kind, **given)
