"""Feature maps φ that the engine applies itself, each with its derivative."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAKY_SLOPE = 0.1


class FeatureMap(NamedTuple):
    """φ, element by element, and the gradient it passes on."""

    forward: Callable[[Tensor, Tensor | None], Tensor]  # (x, memory for the result, if any)
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient of φ(x), x) -> gradient of x


def _copying(mapped: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda x, out: mapped(x) if out is None else out.copy_(mapped(x))


def _relu(x: Tensor, out: Tensor | None) -> Tensor:
    return x.relu() if out is None else torch.clamp(x, min=0, out=out)


def _exp_of_negative(x: Tensor) -> Tensor:
    return x.clamp(max=0).exp()  # the clamp keeps the branch that is not taken finite


def _silu_slope(x: Tensor) -> Tensor:
    gate = x.sigmoid()
    return gate * (1 + x * (1 - gate))


FEATURE_MAPS = {
    "identity": FeatureMap(_copying(lambda x: x), lambda grad, x: grad),
    "relu": FeatureMap(
        _relu,
        lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0),
    ),
    "leaky_relu": FeatureMap(
        _copying(lambda x: F.leaky_relu(x, LEAKY_SLOPE)),
        lambda grad, x: torch.where(x > 0, grad, LEAKY_SLOPE * grad),
    ),
    "1+elu": FeatureMap(
        _copying(lambda x: x.clamp(min=0) + _exp_of_negative(x)),
        lambda grad, x: grad * _exp_of_negative(x),
    ),
    "elu": FeatureMap(
        _copying(F.elu),
        lambda grad, x: grad * _exp_of_negative(x),
    ),
    "silu": FeatureMap(
        _copying(F.silu),
        lambda grad, x: grad * _silu_slope(x),
    ),
}
