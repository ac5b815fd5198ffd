"""Buckets by the kernel, for tests with and without a GPU."""

import torch

from cosformer.ops import buckets

HALVES = [[1], [64], [5, 3], [64, 4, 2]]  # of hashes, which follow one another


def check_buckets(length, width, halves, dtype, device="cpu"):
    """Each is that of the largest number, or of one as large for all that torch could tell."""
    draw = torch.Generator().manual_seed(length + width)
    tokens = torch.randn(2, length, 3, width, generator=draw)
    x = tokens.to(device, dtype).transpose(1, 2)
    rotations = [torch.randn(4, width, half, generator=draw).to(device) for half in halves]
    found = buckets.by_kernel(x, rotations)
    assert found.dtype == torch.int32
    assert found.shape == (2, 3, 4, length)
    for half, rotation in reversed(list(zip(halves, rotations, strict=True))):
        exact, usual = (x.to(y)[:, :, None] @ rotation.to(y) for y in (torch.float64, torch.float))
        column = (found % (2 * half)).long()[..., None]
        chosen = torch.cat([exact, -exact], -1).gather(-1, column)[..., 0]
        error = (usual - exact).abs().amax() + torch.finfo(torch.float).eps
        assert (exact.abs().amax(-1) - chosen <= 2 * 2 * error).all()
        found = found // (2 * half)
    assert not found.any()
