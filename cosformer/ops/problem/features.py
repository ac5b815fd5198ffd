"""Feature maps φ that the engine applies itself, each with its derivative."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAKY_SLOPE = 0.1


class FeatureMap(NamedTuple):
    """φ, element by element, and the gradient it passes on."""

    forward: Callable[[Tensor], Tensor]
    into: Callable[..., Tensor]  # (x, out=memory for the result), not differentiable
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient of φ(x), x) -> gradient of x


def _map(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]
) -> FeatureMap:
    return FeatureMap(forward, lambda x, out: out.copy_(forward(x)), backward)


def _exp_of_negative(x: Tensor) -> Tensor:
    return x.clamp(max=0).exp()  # the clamp keeps the branch that is not taken finite


def _one_plus_elu(x: Tensor) -> Tensor:
    return x.relu() + x.masked_fill(x > 0, 0).exp()  # at 0 clamps would have a slope of 0 or of 2


def _silu_slope(x: Tensor) -> Tensor:
    gate = x.sigmoid()
    return gate * (1 + x * (1 - gate))


FEATURE_MAPS = {
    "identity": _map(lambda x: x, lambda grad, x: grad),
    "relu": FeatureMap(
        torch.relu,
        partial(torch.clamp, min=0),
        lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0),
    ),
    "leaky_relu": _map(
        lambda x: F.leaky_relu(x, LEAKY_SLOPE),
        lambda grad, x: torch.where(x > 0, grad, LEAKY_SLOPE * grad),
    ),
    "1+elu": FeatureMap(
        _one_plus_elu,
        lambda x, out: torch.add(x.clamp(min=0), _exp_of_negative(x), out=out),
        lambda grad, x: grad * _exp_of_negative(x),
    ),
    "elu": _map(F.elu, lambda grad, x: grad * _exp_of_negative(x)),
    "silu": _map(F.silu, lambda grad, x: grad * _silu_slope(x)),
}
