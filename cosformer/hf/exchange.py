"""Models of `cosformer.models` to models of Transformers and back, with the same numbers."""

import re
from typing import cast

from torch import nn

from cosformer.hf.config import CosformerConfig
from cosformer.hf.models import (
    CosformerForCausalLM,
    CosformerForMaskedLM,
    CosformerForSequenceClassification,
    CosformerPreTrainedModel,
)
from cosformer.models import Model, create_model

CLASSES: dict[str, type[CosformerPreTrainedModel]] = {
    "decoder": CosformerForCausalLM,
    "masked-lm": CosformerForMaskedLM,
    "classifier": CosformerForSequenceClassification,
}
"""Kind of `ModelConfig` -> the native class."""


def to_transformers(model: Model) -> CosformerPreTrainedModel:
    """A copy of a model of `cosformer.models` as a model of Transformers'.

    Args:
        model: a `LanguageModel`, a `MaskedLanguageModel` or a `Classifier`.

    >>> from cosformer.models import LanguageModel, ModelConfig
    >>> type(to_transformers(LanguageModel(ModelConfig()))).__name__
    'CosformerForCausalLM'
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be one of cosformer.models, got {type(model).__name__}")
    config = CosformerConfig.of(model.config)
    made = CLASSES[model.config.kind](config)
    stored = {_theirs(name, model.config.kind): x for name, x in model.state_dict().items()}
    first = next(model.parameters())
    cast(nn.Module, made).to(first.device, first.dtype).load_state_dict(stored)
    return made.train(model.training)


def to_cosformer(model: CosformerPreTrainedModel) -> Model:
    """A copy of a native model of Transformers' as the model of `cosformer.models` that it wraps.

    Args:
        model: a `CosformerForCausalLM`, a `CosformerForMaskedLM` or a
            `CosformerForSequenceClassification`; of one with adapters, what merging them gives.
    """
    if not isinstance(model, tuple(CLASSES.values())):
        known = ", ".join(each.__name__ for each in CLASSES.values())
        raise TypeError(f"model must be one of {known}, got {type(model).__name__}")
    assert model.kind is not None
    made = create_model(model.config.model_config(model.kind))
    stored, first = model.state_dict(), next(model.parameters())
    wanted = {name: stored[_theirs(name, model.kind)] for name in made.state_dict()}
    made.to(first.device, first.dtype).load_state_dict(wanted)
    return made.train(model.training)


def _theirs(name: str, kind: str) -> str:
    """The name of a parameter in the model of Transformers'."""
    name = re.sub(r"\.in_proj_(weight|bias)$", r".in_proj.\1", name)
    if name.startswith("backbone."):
        return f"model.{name}"
    return name.replace("head.", "score." if kind == "classifier" else "lm_head.", 1)
