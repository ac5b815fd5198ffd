"""Model sizes with names; `dataclasses.replace(PRESETS["small"], kind=…)` changes one."""

from cosformer.models.config import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(layers=2, width=64, heads=2),
    "mini": ModelConfig(layers=4, width=128, heads=4),
    "small": ModelConfig(layers=6, width=256, heads=4),
    "medium": ModelConfig(vocabulary=8192, layers=8, width=512, heads=8),
    "base": ModelConfig(vocabulary=50304, layers=12, width=768, heads=12, max_length=2048),
    "large": ModelConfig(vocabulary=50304, layers=24, width=1024, heads=16, max_length=2048),
    "huge": ModelConfig(vocabulary=50304, layers=24, width=2048, heads=16, max_length=2048),
}
"""Decoders over bytes; from `medium` on they have the vocabulary of a byte-pair encoding. `base`,
`large` and `huge` have 125 million, 350 million and 1.3 billion parameters."""

PARAMETERS = {
    "tiny": 182_016,
    "mini": 957_184,
    "small": 5_066_752,
    "medium": 29_938_688,
    "base": 125_262_336,
    "large": 355_919_872,
    "huge": 1_315_819_520,
}
"""Number of parameters of each preset; a test counts them."""
