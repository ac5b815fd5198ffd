"""Where the kernels of `running_share.py` look for a cell of a large matrix."""

import torch
import triton
import triton.language as tl

from cosformer.ops.running_share_kernels import cells_of


@triton.jit
def cells_kernel(out, first, size, N: tl.constexpr):
    place = tl.arange(0, N)
    found = cells_of(first + place, place, size)
    tl.store(out + place[:, None] * N + place[None, :], found)


def check_cells(device="cpu"):
    """Cells from the diagonal on, around the last that 32 bits count."""
    count, size = 4, 46_400
    out = torch.zeros(count, count, dtype=torch.int64, device=device)
    cells_kernel[(1,)](out, 46_280, size, N=count)
    place = torch.arange(count)
    assert torch.equal(out.cpu(), (46_280 + place)[:, None] * size + place)
    assert out.min() < 2**31 < out.max()
