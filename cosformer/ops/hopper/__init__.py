"""Attention in linear time by CUDA C++ for Hopper GPUs: H100 and H200."""

from cosformer.ops.hopper import cache, nvrtc
from cosformer.ops.hopper.packing import place_packed
from cosformer.ops.hopper.passes import (
    MAX_WIDTH,
    aligned,
    backward,
    backward_with_decay,
    forward,
    places,
    why_not,
    why_not_given,
)
from cosformer.ops.hopper.roles import MAPS
from cosformer.ops.hopper.tape import Tape, on_tape
