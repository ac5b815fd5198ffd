"""dL of a stretch that begins and ends without a state: one kernel in place of a dozen of torch's.

The formula, and what it is for, is `decay_gradient` in `trilinear.py`, which serves elsewhere.
"""

from torch import Tensor

from cosformer.ops.triton.tiles import TILE
from cosformer.runtime import kernels_serve, on_device_of


def is_served(by_query: Tensor, decay: Tensor) -> bool:
    """Whether the kernel makes dL of φ(q)·dφ(q) `[B, H, T, 1]`: each row has an L of its own."""
    return kernels_serve(by_query) and by_query.shape[:3] == decay.shape


def balanced(by_query: Tensor, by_key: Tensor, decay: Tensor) -> Tensor:
    """`decay_gradient(by_query, by_key, None, decay, zeros)`."""
    from cosformer.ops.triton.kernels.gates import balance_kernel

    batch, heads, length = decay.shape
    found = decay.new_empty(decay.shape)
    with on_device_of(decay):
        balance_kernel[(batch * heads,)](
            by_query.contiguous(), by_key.contiguous(), found, length, BLOCK=TILE, num_warps=8
        )
    return found
