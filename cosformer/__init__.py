"""Linear-time attention: cosFormer made exact, fast, streamable and easy to drop in."""

from cosformer.nn import convert
from cosformer.ops import (
    State,
    attention,
    attention_weights,
    attention_with_state,
    linear_attention,
    linear_attention_with_state,
    step,
)

__version__ = "0.1.0"
__all__ = [
    "State",
    "attention",
    "attention_weights",
    "attention_with_state",
    "convert",
    "linear_attention",
    "linear_attention_with_state",
    "step",
]
