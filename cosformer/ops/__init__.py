"""The functions: public op, state, reference, chunked implementation."""

from cosformer.ops.cosine import attention, attention_weights, attention_with_state
from cosformer.ops.engine import linear_attention, linear_attention_with_state
from cosformer.ops.state import State
from cosformer.ops.step import step

__all__ = [
    "State",
    "attention",
    "attention_weights",
    "attention_with_state",
    "linear_attention",
    "linear_attention_with_state",
    "step",
]
