"""The functions: attention, its family, the state of a stream, and one token of it."""

from cosformer.ops.attention import attention, attention_weights, attention_with_state
from cosformer.ops.decays import multiscale_decays, read_decay
from cosformer.ops.dispatch import IMPLS, compute
from cosformer.ops.layout import GATES, After, Layout
from cosformer.ops.linear import (
    Arguments,
    check_arguments,
    check_per_key_head,
    linear_attention,
    linear_attention_with_state,
    mapped,
    stream_problem,
)
from cosformer.ops.problem import (
    WEIGHTS,
    Rates,
    angle_of,
    check_length,
    check_weight,
    kind_within,
    read_horizon,
    vanishes,
    vanishing_decay,
    whole_limit,
)
from cosformer.ops.rows import Linear, Norm, added_linear, convolve, normed_linear
from cosformer.ops.state import State, check_continues, check_state_shape
from cosformer.ops.step import (
    Recurrence,
    StepGraph,
    linear_attention_step,
    recurrence,
    step,
    take_step,
)
from cosformer.ops.token import Clock, SumsToken, laid_out
from cosformer.ops.triton import early_launch, likeliest_serves, take_likeliest

__all__ = [  # what users call; the other names are for other rooms
    "State",
    "StepGraph",
    "attention",
    "attention_weights",
    "attention_with_state",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_with_state",
    "multiscale_decays",
    "step",
]
