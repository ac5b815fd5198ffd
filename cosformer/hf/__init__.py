"""Hugging Face Transformers: cosFormer in its models, and our models as its own.

Importing this package registers the attention functions `cosformer` and `cosformer-multiscale`
(`attn_implementation=…`), the native models with the Auto classes, and how converted ones load.
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from cosformer.hf.attention import (
    MULTISCALE_HORIZON,
    attention_mask_for,
    cosformer_attention,
    multiscale_attention,
)
from cosformer.hf.cache import CosformerCache, ModelCache
from cosformer.hf.config import CosformerConfig
from cosformer.hf.converted import (
    EXACT,
    IMPLEMENTATION,
    METHOD,
    REPLACEMENTS,
    ConvertedConfig,
    ConvertedHeads,
    ConvertedLoader,
    converted_attention,
    find_layers,
    heads_of,
    matching,
    relative_error,
    replace_attention,
)
from cosformer.hf.exchange import to_cosformer, to_transformers
from cosformer.hf.models import (
    CosformerForCausalLM,
    CosformerForMaskedLM,
    CosformerForSequenceClassification,
    CosformerModel,
)
from cosformer.hf.tokenizer import create_tokenizer

__all__ = [
    "ConvertedConfig",
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
    "replace_attention",
    "to_cosformer",
    "to_transformers",
]


def _register() -> None:
    """Make the names known to Transformers; a second time changes nothing."""
    attention = {
        "cosformer": cosformer_attention,
        "cosformer-multiscale": multiscale_attention,
        IMPLEMENTATION: converted_attention,
    }
    for name, function in attention.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, attention_mask_for)  # without it padding would leak
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(ConvertedConfig)
        register_quantizer(METHOD)(ConvertedLoader)
    AutoConfig.register("cosformer", CosformerConfig, exist_ok=True)
    AutoModel.register(CosformerConfig, CosformerModel, exist_ok=True)
    AutoModelForCausalLM.register(CosformerConfig, CosformerForCausalLM, exist_ok=True)
    # Trainer shifts labels for label smoothing if it finds the class among these names alone
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["cosformer"] = CosformerForCausalLM.__name__
    AutoModelForMaskedLM.register(CosformerConfig, CosformerForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        CosformerConfig, CosformerForSequenceClassification, exist_ok=True
    )


_register()
