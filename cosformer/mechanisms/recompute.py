"""Less memory for more time: what a function makes on the way is made again for the gradient."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from cosformer.runtime import transformed

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)`, computed again in the backward pass instead of kept for it.

    The function must draw no random numbers. Transforms of torch.func know nothing of
    checkpoints, so that under them everything is kept; torch.compile decides itself what to keep.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transformed():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
