"""The functions: public op, state, and what computes them: reference, chunked, kernels."""

from cosformer.ops.attention import attention, attention_weights, attention_with_state
from cosformer.ops.linear import linear_attention, linear_attention_with_state
from cosformer.ops.state import State
from cosformer.ops.step import StepGraph, linear_attention_step, step

__all__ = [
    "State",
    "StepGraph",
    "attention",
    "attention_weights",
    "attention_with_state",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_with_state",
    "step",
]
