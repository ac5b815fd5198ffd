"""Functions of plain tensor operations that become one kernel on a GPU."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cosformer.runtime import transformed

KERNELS = 256
"""Compiled forms of one function: with and without causality, mask, gradient, changing lengths."""


def run_compiled(function: Any, *given: Any, on: Tensor) -> Any:
    """`function(*given)`, compiled if `on` is a CUDA tensor and no outer graph compiles it."""
    if not on.is_cuda or torch.compiler.is_compiling() or transformed():
        return function(*given)
    with torch._dynamo.config.patch(recompile_limit=KERNELS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice on speed
        return _compiled(function)(*given)


@cache
def _compiled(function: Any) -> Any:
    # fullgraph: an error where FlexAttention, outside of a graph, would compute every score
    return torch.compile(function, fullgraph=True)
