"""Linear attention on features that are too wide for a GPU's fastest kernels, a group at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.ops import linear_attention
from cosformer.ops.normaliser import denominator
from cosformer.ops.projected import ALIGNED

GROUP = 128
"""Features and columns of v at a time, at most: wider ones go to slower kernels, or to none."""


def is_too_wide(features: Tensor) -> bool:
    return features.is_cuda and features.shape[-1] > GROUP


def in_groups(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """`linear_attention(q, k, v, **options)` by sums over groups of features, divided once."""
    undivided = options | {"normaliser": "none"}
    if options["feature_map"] == "identity":  # under any other, zeros might count
        q, k = (_aligned(x) for x in (q, k))
    if options["normaliser"] == "none":
        return _sum(q, k, v, undivided)
    width = v.shape[-1]
    if width + ALIGNED <= GROUP:
        sums = _sum(q, k, torch.cat([v, ones(v)], -1), undivided)
        above, below = sums[..., :width], sums[..., width : width + 1]
    else:
        above, below = _sum(q, k, v, undivided), _sum(q, k, ones(v), undivided)[..., :1]
    return above / denominator(below, options["rule"], options["eps"])


def ones(v: Tensor) -> Tensor:
    """Values that sum weights, in as many columns as kernels want: no memory for any token."""
    return v.new_ones(ALIGNED).expand(*v.shape[:3], -1)


def _aligned(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % ALIGNED
    return F.pad(x, (0, missing)) if missing else x


def _sum(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    count = -(-q.shape[-1] // GROUP)
    size = -(-q.shape[-1] // (count * ALIGNED)) * ALIGNED  # as even as multiples allow
    groups = zip(q.split(size, -1), k.split(size, -1), strict=True)
    sums = torch.stack([linear_attention(*each, v, **options) for each in groups])
    return sums.sum(0, dtype=torch.promote_types(v.dtype, torch.float32))
