"""The functions: public op, state, and what computes them: reference, chunked, kernels."""

from cosformer.ops.cosine import attention, attention_weights, attention_with_state
from cosformer.ops.decode import StepGraph
from cosformer.ops.engine import linear_attention, linear_attention_with_state
from cosformer.ops.state import State
from cosformer.ops.step import step

__all__ = [
    "State",
    "StepGraph",
    "attention",
    "attention_weights",
    "attention_with_state",
    "linear_attention",
    "linear_attention_with_state",
    "step",
]
