"""The functions: public op, state, and what computes them: reference, chunked, kernels."""

from cosformer.ops.attention import attention, attention_weights, attention_with_state
from cosformer.ops.linear import linear_attention, linear_attention_with_state
from cosformer.ops.problem.memo import Memo
from cosformer.ops.problem.problem import WEIGHTS
from cosformer.ops.state import State, check_continues, check_weight, read_horizon, whole_limit
from cosformer.ops.step import linear_attention_step, step
from cosformer.ops.triton.decode import StepGraph

__all__ = [
    "WEIGHTS",
    "Memo",
    "State",
    "StepGraph",
    "attention",
    "attention_weights",
    "attention_with_state",
    "check_continues",
    "check_weight",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_with_state",
    "read_horizon",
    "step",
    "whole_limit",
]
