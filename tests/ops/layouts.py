"""Tensors `[B, H, T, D]` as others lay them out in memory."""

import torch


def dense(x):
    return x.clone(memory_format=torch.contiguous_format)


def heads_inside(x):
    """As a projection, [B, T, H·D], has it."""
    return dense(x.transpose(1, 2)).transpose(1, 2)


def in_columns(x):
    """As the output of a convolution, [B, H·D, T], has it."""
    return dense(x.mT).mT


def sliced(x):
    """Every second number of storage that holds NaN elsewhere."""
    wide = torch.full([2 * size for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    view = wide[::2, 1::2, ::2, 1::2]
    view.copy_(x)
    return view


def batch_last(x):
    return dense(x.permute(1, 2, 3, 0)).permute(3, 0, 1, 2)


def expanded(x):
    return x[:1, :, :1].expand(x.shape)
