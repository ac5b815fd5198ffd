"""Floating-point operations of a model by formula, and how many a device could do."""

from typing import cast

from cosformer.models import LanguageModel
from cosformer.nn import Block

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Part of a device's name -> dense bfloat16 or float16 operations a second, as its maker says."""
HALF_TYPES = ("bfloat16", "float16")


def training_flops(model: LanguageModel, length: int) -> float:
    """Operations of forward and backward for every token of sequences of this length.

    Two for each weight of a matrix, those of the mechanism, and twice as many going back. The
    embedding is looked up, not multiplied; what is computed again is not counted.
    """
    blocks = [cast(Block, block) for block in model.backbone.blocks]
    matrices = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() > 1)
    attention = sum(_attention(block, length) for block in blocks)
    forward = 2 * (matrices + model.head.weight.numel()) + attention / length
    return 3 * forward


def peak_flops(name: str, dtype: str) -> float | None:
    """The most operations a second of a device; None where its maker states none for this type."""
    known = (peak for part, peak in PEAKS.items() if part in name)
    return next(known, None) if dtype in HALF_TYPES else None


def _attention(block: Block, length: int) -> float:
    """Operations of attention over one sequence; of n² pairs a causal mechanism computes half."""
    mechanism = block.attention.mechanism
    operations = mechanism.cost(length).operations
    return operations / 2 if mechanism.traits.growth == "n²" else operations
