"""Attention in linear time by Triton kernels, on any GPU that Triton knows."""

from cosformer.ops.triton.gates import balanced_decay_gradient, sum_gates, sum_gates_backward
from cosformer.ops.triton.likeliest import likeliest_serves, take_likeliest
from cosformer.ops.triton.passes import INTERPRETED, MAPS, backward, forward, why_not
from cosformer.ops.triton.rows import (
    FEW,
    add_norm,
    convolve_rows,
    early_launch,
    linear_rows,
    rows_serve,
)
from cosformer.ops.triton.step import fused_step, why_not_step
from cosformer.ops.triton.token import sums_token, token_serves
