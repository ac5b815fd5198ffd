"""Less memory for more time: what a function makes on the way is made again for the gradient."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)`, computed again in the backward pass instead of kept for it.

    The function must draw no random numbers. Transforms of torch.func know nothing of
    checkpoints: under them everything is kept.
    """
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
