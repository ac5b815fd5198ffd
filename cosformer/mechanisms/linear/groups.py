"""Linear attention on features that are too wide for a GPU's fastest kernels, a group at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cosformer.ops import linear_attention
from cosformer.ops.apart import is_served, sums_apart
from cosformer.ops.features.projected import ALIGNED
from cosformer.ops.features.quotient import quotient
from cosformer.ops.hopper.passes import MAX_WIDTH

GROUP = MAX_WIDTH
"""Features and columns of v at a time, at most: wider ones go to slower kernels, or to none."""
WIDEST = {torch.bfloat16: GROUP}
"""Features that one call takes, by dtype; Triton's kernels take 256 of any."""
PLAIN = {"feature_map", "normaliser", "rule", "eps", "key_mask", "causal", "impl"}
"""Options under which all weights are 1, and queries stand where keys do."""


def goes_in_groups(features: Tensor) -> bool:
    """Whether the fastest kernels take parts of the features only."""
    return features.is_cuda and features.shape[-1] > WIDEST.get(features.dtype, 256)


def in_groups(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """`linear_attention(q, k, v, **options)` by sums over groups of features, divided once."""
    undivided = options | {"normaliser": "none"}
    q, k, v = (far_reaching(x) for x in (q, k, v))
    if options["feature_map"] == "identity":  # under any other, zeros might count
        q, k = (_aligned(x) for x in (q, k))
    if options["normaliser"] == "none":
        return torch.stack(_parts(q, k, v, undivided)).sum(0)
    width = v.shape[-1]
    here = (options["feature_map"], options["causal"], options.get("log_decay"))
    if (PLAIN | {"log_decay"}).issuperset(options) and is_served(q, k, v, *here):
        parts, totals = sums_apart(q, k, v, options["key_mask"], *here)
    elif width + ALIGNED <= GROUP:
        parts, totals = _parts(q, k, torch.cat([v, ones(v)], -1), undivided), []
    else:
        parts, totals = (_parts(q, k, x, undivided) for x in (v, ones(v)))
    return quotient(parts, totals, width, options["rule"], options["eps"])


def far_reaching(x: Tensor) -> Tensor:
    """For sums not divided yet, or features over sums: float16 ends at 65,504 and 6·10⁻⁸."""
    return x.float() if x.dtype == torch.float16 else x


def ones(v: Tensor) -> Tensor:
    """Values that sum weights, in as many columns as kernels want, shared by batches and heads.

    Tokens share none: all multiprocessors would read the same few bytes of one slice of a cache.
    """
    return v.new_ones(v.shape[2], ALIGNED).expand(*v.shape[:2], -1, -1)


def _aligned(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % ALIGNED
    return F.pad(x, (0, missing)) if missing else x


def _parts(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The sums over each group of features."""
    groups = zip(q.split(GROUP, -1), k.split(GROUP, -1), strict=True)
    return [linear_attention(*each, v, **options) for each in groups]
