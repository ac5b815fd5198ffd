"""Sums of sines with noise at sizes for tests, by kernels and by the formula."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.ops import sines


class Case(NamedTuple):
    width: int
    count: int  # of sines
    columns: int
    heads: int = 2
    apart: bool = False  # every one of the batch has positions of its own


CASES = {
    "even": Case(64, 1, 64),
    "odd": Case(10, 2, 70),
    "grouped": Case(20, 1, 40, heads=6),
    "apart": Case(33, 2, 24, apart=True),
    "many columns": Case(7, 1, 300, heads=4, apart=True),
}


class Given(NamedTuple):
    """x `[2, H, T, D]` with the strides of a projection; sines of two heads."""

    x: Tensor
    sines: sines.Sines
    position: Tensor
    noise: Tensor
    grad: Tensor

    def mixed(self, by: Callable[..., Tensor], x: Tensor, *learned: Tensor) -> Tensor:
        return by(x, self.position, sines.Sines(*learned), self.noise)

    def results(self, by: Callable[..., Tensor]) -> list[Tensor]:
        """The sums, and gradients of x, rates, phases and gains."""
        leaves = [y.detach().requires_grad_() for y in (self.x, *self.sines)]
        out = self.mixed(by, *leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]


def draw(case: Case, length: int, dtype: torch.dtype) -> Given:
    """Where there is a GPU, on it; x and the gradient are rounded to `dtype`."""
    generator = torch.Generator().manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x, grad = (normal(2, length, case.heads, y) for y in (case.width, case.columns))
    rate, phase, gain = normal(3, 2, case.width, case.count)
    start = torch.tensor([[70000], [3]] if case.apart else [[1000]], device=device)
    return Given(
        x.to(dtype).transpose(1, 2),
        sines.Sines(3 * rate.double().sigmoid(), phase, gain.sigmoid()),
        start + torch.arange(length, dtype=torch.float64, device=device),
        normal(2, case.width, 2 * case.count, case.columns),
        grad.to(dtype).transpose(1, 2),
    )


def mixed_results(given: Given) -> list[list[Tensor]]:
    """Of the kernels, of the formula with noise as precise as x, and of the formula in float64."""
    exact = given._replace(
        x=given.x.double(),
        sines=sines.Sines(*(y.double() for y in given.sines)),
        noise=given.noise.double(),
        grad=given.grad.double(),
    )
    plain = given._replace(noise=given.noise.to(given.x.dtype))
    return [
        given.results(sines.by_kernel),
        plain.results(sines.by_formula),
        exact.results(sines.by_formula),
    ]
