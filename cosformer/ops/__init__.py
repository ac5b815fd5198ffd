"""The functions: attention, its family, the state of a stream, and one token of it."""

from cosformer.ops.attention import attention, attention_weights, attention_with_state
from cosformer.ops.dispatch import IMPLS as IMPLS
from cosformer.ops.linear import linear_attention, linear_attention_with_state
from cosformer.ops.problem import WEIGHTS as WEIGHTS
from cosformer.ops.problem import angle_of as angle_of
from cosformer.ops.problem import check_length as check_length
from cosformer.ops.problem import check_weight as check_weight
from cosformer.ops.problem import read_horizon as read_horizon
from cosformer.ops.problem import whole_limit as whole_limit
from cosformer.ops.state import State
from cosformer.ops.state import check_continues as check_continues
from cosformer.ops.state import check_state as check_state
from cosformer.ops.step import Rule as Rule
from cosformer.ops.step import StepGraph, linear_attention_step, step
from cosformer.ops.step import take_step as take_step

__all__ = [  # what users call; the names that other rooms need are imported as themselves
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
