"""Gradients of every choice of inputs, beside those of all; for the CPU and for a GPU."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor


def choices(count: int) -> list[tuple[bool, ...]]:
    """Which of so many inputs ask for a gradient: all first, none last."""
    return list(product([True, False], repeat=count))


def gradients(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], asked: Sequence[bool]
) -> list[Tensor | None]:
    """Under a fixed random cotangent; None where there is none."""
    leaves = [x.detach().requires_grad_(each) for x, each in zip(inputs, asked, strict=True)]
    out = call(*leaves)
    assert out.requires_grad == any(asked)
    if any(asked):
        generator = torch.Generator().manual_seed(7)
        out.backward(torch.randn(out.shape, generator=generator).to(out))
    return [x.grad for x in leaves]


def check_choices(
    call: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> None:
    """Whoever else asks, an input that does has one gradient, and one that does not has none."""
    for asked in choices(len(inputs)):
        found = gradients(call, inputs, asked)
        if all(asked):
            full = found
        for x, right, each in zip(found, full, asked, strict=True):
            assert (x is not None) == each
            assert x is None or same(x, right), asked
