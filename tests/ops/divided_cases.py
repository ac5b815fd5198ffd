"""Rotary features over their denominators at sizes for tests, by kernels and by the formula."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.ops import divided


class Case(NamedTuple):
    width: int
    key_heads: int = 2
    groups: int = 1
    causal: bool = True
    masked: bool = False


CASES = {
    "usual": Case(64),
    "narrow": Case(2, 5),
    "odd": Case(10, 1, 6, masked=True),
    "wide": Case(100, 1),
    "grouped": Case(24, 3, 2, masked=True),
    "not causal": Case(10, 2, 3, causal=False, masked=True),
}


class Given(NamedTuple):
    """q `[2, H, T, D]`, k and gradients of their features, with the strides of a projection."""

    q: Tensor
    k: Tensor
    grads: tuple[Tensor, Tensor]
    key_mask: Tensor | None
    setting: divided.Setting

    def features(self, by: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor):
        return by(q, k, self.key_mask, self.setting)

    def results(self, by: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Features of q and k, and the gradients of both."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k)]
        out = self.features(by, *leaves)
        return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, self.grads)]

    def to(self, dtype: torch.dtype) -> "Given":
        grads = tuple(x.to(dtype) for x in self.grads)
        return self._replace(q=self.q.to(dtype), k=self.k.to(dtype), grads=grads)


def draw(case: Case, length: int, dtype: torch.dtype) -> Given:
    """Where there is a GPU, on it; the first key is real."""
    generator = torch.Generator().manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = (case.key_heads * case.groups, case.key_heads)
    q, k, grad_q, grad_k = (
        torch.randn(2, length, n, case.width, generator=generator).to(device, dtype).transpose(1, 2)
        for n in 2 * heads
    )
    mask = torch.rand(2, length, generator=generator) > 0.3
    mask[:, 0] = True
    setting = divided.Setting(case.causal, 1e4, 1e-6)
    return Given(q, k, (grad_q, grad_k), mask.to(device) if case.masked else None, setting)


def divided_results(given: Given) -> list[list[Tensor]]:
    """Of the kernels, of the formula at that precision, and of the formula in float64."""
    return [
        given.results(divided.by_kernel),
        given.results(divided.by_formula),
        given.to(torch.float64).results(divided.by_formula),
    ]
