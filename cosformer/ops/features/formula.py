"""Gradients of a formula where kernels have none: derivatives beyond the first."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cosformer.runtime import recorded


def formula_gradients(
    formula: Callable[..., Any], inputs: Sequence[Tensor], needs: Sequence[bool], grads: Any
) -> list[Tensor | None]:
    """Of what `formula(*inputs)` returns, for the inputs that need one, with a graph if recorded.

    An input may be another one, or follow from it: views keep apart what autograd adds up itself.
    """
    graph = recorded()
    with torch.enable_grad():
        views = [x.view_as(x) for x in inputs]
        found = formula(*views)
        asked = [x for x, needed in zip(views, needs, strict=True) if needed]
        slopes = iter(torch.autograd.grad(found, asked, grads, create_graph=graph))
    return [next(slopes) if needed else None for needed in needs]
