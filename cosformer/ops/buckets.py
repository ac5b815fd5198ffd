"""Buckets of rows by the direction they point in, argmax[xR; −xR]: by torch, or by a kernel."""

import torch
from torch import Tensor

from cosformer.ops.features.projected import FEWEST
from cosformer.ops.triton.tiles import padded
from cosformer.runtime import compute_dtype, kernels_serve, on_device_of

ROWS = 128
WIDEST = 128
"""Columns of x, whose tile must fit in registers."""


def buckets(x: Tensor, rotations: list[Tensor]) -> Tensor:
    """Numbers of buckets, int32 `[B, H, rounds, n]`; several hashes make one number.

    Args:
        x: `[B, H, n, D]`.
        rotations: R of every hash, `[rounds, D, buckets/2]`, in the dtype that x is computed in.
    """
    served = x.dtype.itemsize == 2 and x.shape[3] <= WIDEST and kernels_serve(x)
    return (by_kernel if served else by_formula)(x.detach(), rotations)


def by_formula(x: Tensor, rotations: list[Tensor]) -> Tensor:
    x = x.to(compute_dtype(x.dtype))
    rounds = zip(*rotations, strict=True)
    found = [_bucket(x, matrices) for matrices in rounds]
    return torch.stack(found, 2).to(torch.int32)


def by_kernel(x: Tensor, rotations: list[Tensor]) -> Tensor:
    from cosformer.ops.buckets_kernels import buckets_kernel

    batch, heads, length, width = x.shape
    rounds, blocks = rotations[0].shape[0], -(-length // ROWS)
    out = x.new_empty(batch, heads, rounds, length, dtype=torch.int32)
    with on_device_of(x):
        for n, rotation in enumerate(rotations):
            half = rotation.shape[2]
            buckets_kernel[(blocks * batch * heads,)](
                x, rotation.contiguous(), out, blocks, heads, length, half, *x.stride(),
                D=width, ROUNDS=rounds, FIRST=n == 0, ROWS=ROWS,
                BLOCK_D=padded(width, FEWEST), BLOCK_H=padded(half, FEWEST), num_stages=1,
            )  # fmt: skip
    return out


def _bucket(x: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
    """Of one round, int64 `[B, H, n]`."""
    bucket = torch.zeros(x.shape[:3], dtype=torch.int64, device=x.device)
    for matrix in matrices:
        turned, half = x @ matrix, matrix.shape[1]
        nearest = turned.abs().argmax(-1, keepdim=True)
        opposite = turned.gather(-1, nearest) < 0
        bucket = bucket * 2 * half + (nearest + half * opposite)[..., 0]
    return bucket
