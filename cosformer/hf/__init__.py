"""Hugging Face Transformers: cosFormer in its models, and our models as its own.

Importing this package registers the attention functions `cosformer` and `cosformer-multiscale`
(`attn_implementation=…`), and the native models with the Auto classes.
"""

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from cosformer.hf.attention import attention_mask_for, cosformer_attention, multiscale_attention
from cosformer.hf.cache import CosformerCache, ModelCache
from cosformer.hf.config import CosformerConfig
from cosformer.hf.exchange import to_cosformer, to_transformers
from cosformer.hf.models import (
    CosformerForCausalLM,
    CosformerForMaskedLM,
    CosformerForSequenceClassification,
    CosformerModel,
)
from cosformer.hf.tokenizer import create_tokenizer

__all__ = [
    "CosformerCache",
    "CosformerConfig",
    "CosformerForCausalLM",
    "CosformerForMaskedLM",
    "CosformerForSequenceClassification",
    "CosformerModel",
    "ModelCache",
    "cosformer_attention",
    "create_tokenizer",
    "multiscale_attention",
    "to_cosformer",
    "to_transformers",
]


def _register() -> None:
    """Make the names known to Transformers; a second time changes nothing."""
    attention = {"cosformer": cosformer_attention, "cosformer-multiscale": multiscale_attention}
    for name, function in attention.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, attention_mask_for)  # without it padding would leak
    AutoConfig.register("cosformer", CosformerConfig, exist_ok=True)
    AutoModel.register(CosformerConfig, CosformerModel, exist_ok=True)
    AutoModelForCausalLM.register(CosformerConfig, CosformerForCausalLM, exist_ok=True)
    AutoModelForMaskedLM.register(CosformerConfig, CosformerForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        CosformerConfig, CosformerForSequenceClassification, exist_ok=True
    )


_register()
