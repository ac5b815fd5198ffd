"""Linear attention on features that are too wide for a GPU's fastest kernels, a group at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.ops import linear_attention
from cosformer.ops.problem import DENOMINATORS
from cosformer.runtime import compute_dtype

GROUP = 128
"""The most features, and columns of v, that the fastest kernels take; they take bfloat16 alone."""
WIDEST = 256
"""The most features that the other kernels take."""
ALIGNED = 8
"""Widths must be multiples of it: 16 bytes."""


def goes_in_groups(features: Tensor) -> bool:
    """Whether a GPU computes groups of these features faster than all at once."""
    most = GROUP if features.dtype == torch.bfloat16 else WIDEST
    return features.is_cuda and features.shape[-1] > most


def in_groups(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """`linear_attention(q, k, v, **options)` by sums over groups of features, divided once.

    The sums of weights come as more columns of the values. They are not divided yet, and float16
    would not reach as far: it is computed in float32.
    """
    q, k, v = (x.float() if x.dtype == torch.float16 else x for x in (q, k, v))
    missing = -q.shape[-1] % ALIGNED
    if missing and options["feature_map"] == "identity":  # zeros might count under any other
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    width, divided = v.shape[-1], options["normaliser"] == "sum"
    if divided:
        v = torch.cat([v, v.new_ones(*v.shape[:3], ALIGNED)], -1)
    pairs = zip(q.split(GROUP, -1), k.split(GROUP, -1), strict=True)
    undivided = options | {"normaliser": "none"}
    parts = [linear_attention(*pair, v, **undivided) for pair in pairs]
    sums = torch.stack(parts).sum(0, dtype=compute_dtype(v.dtype))
    if not divided:
        return sums
    return quotient(sums[..., :width], sums[..., width, None], options["rule"], options["eps"])


def quotient(sums: Tensor, total: Tensor, rule: str, eps: float) -> Tensor:
    """sums/total, by a rule for totals near 0."""
    # the gradient of a division makes three more tensors
    return sums * DENOMINATORS[rule](total, eps).reciprocal()
