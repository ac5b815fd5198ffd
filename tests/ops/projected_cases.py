"""Maps of projections at sizes for tests, what they give, and how far from it one may be."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.ops import series
from cosformer.ops.features import projected
from cosformer.ops.features import rotary as rotation


class Case(NamedTuple):
    kind: str
    rows: int
    width: int
    weights: int | None = None  # of how many heads; None: one for all, which is not learned
    relative: bool = False

    def draw(self, length, heads=4, batch=2):
        """x, W, level, a gradient; float64."""
        generator = torch.Generator().manual_seed(5)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        x = normal(batch, heads, length, self.width)
        count = () if self.weights is None else (self.weights,)
        weight = 2 * normal(*count, self.rows, self.width) / self.width**0.5
        level = 3 * normal(batch, heads, length) if self.relative else None
        columns = projected.MAPS[self.kind].parts * self.rows
        return x, weight, level, normal(batch, heads, length, columns)

    def shares(self, x):
        """A factor of every token's features, in the dtype and on the device of x; one is 0."""
        generator = torch.Generator().manual_seed(6)
        share = torch.rand(x.shape[:3], generator=generator, dtype=torch.float64)
        share[..., -1] = 0
        return share.to(x)

    def results(self, made, x, weight, level, grad, share=None):
        """Features and gradients."""
        leaves = [x.clone().requires_grad_()]
        if self.weights is not None:
            leaves.append(weight.clone().requires_grad_())
            weight = leaves[1]
        level = None if level is None else level.to(torch.promote_types(x.dtype, torch.float32))
        if share is not None:
            share = share.clone().requires_grad_()
            leaves.append(share)
        out = made(leaves[0], weight, self.kind, level, share)
        grad = torch.nn.functional.pad(grad, (0, out.shape[-1] - grad.shape[-1])).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


CASES = {
    "exponentials": Case("exp", 70, 12),
    "exponentials, relative": Case("exp", 70, 12, relative=True),
    "exponentials, aligned": Case("exp", 128, 64),
    "exponentials, learned": Case("exp", 70, 12, 2),
    "waves": Case("waves", 24, 16, 2),
    "waves, odd": Case("waves", 63, 5, 1),
    "relu": Case("relu", 20, 16, 4),
    "softmaxes": Case("softmaxes", 64, 64, 4),
    "softmaxes, odd": Case("softmaxes", 7, 7, 2),
}


def series_results(
    shape: list[int],
    narrow: int | None,
    dtype: torch.dtype,
    stored: torch.dtype = torch.float32,
) -> list[list[Tensor]]:
    """Of the kernel, of the formula at that precision, and of the formula in float64.

    x `[B, T, H, D]` is drawn in that shape and rounded to `dtype` first, weights to `stored`.
    """
    generator = torch.Generator().manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, found = torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2), []
    heads, width = x.shape[1], x.shape[-1]
    weight = None
    if narrow is not None:
        weight = torch.randn(heads, width, narrow, generator=generator).to(device, stored)
    columns = series.series_width(narrow or width)
    grad = torch.randn(*x.shape[:3], columns, generator=generator).to(device, dtype)
    for made, kind in (
        (series.by_kernel, dtype),
        (series.by_formula, dtype),
        (series.by_formula, torch.float64),
    ):
        leaves = [x.to(kind).detach().requires_grad_()]
        if weight is not None:
            exact = kind == torch.float64
            leaves.append(weight.to(kind if exact else stored, copy=True).requires_grad_())
        out = made(*(leaves if weight is not None else [leaves[0], None]))
        padded = torch.nn.functional.pad(grad, (0, out.shape[-1] - columns))
        found.append([out.detach(), *torch.autograd.grad(out, leaves, padded.to(kind))])
    return found


def rotated_results(x: Tensor, grad: Tensor, start: Any, dtype: torch.dtype) -> list[list[Tensor]]:
    """The same of rotated features of x `[B, T, H, D]`, rounded to `dtype` first."""
    x, found = x.to(dtype), []
    for made, kind in (
        (rotation.by_kernel, dtype),
        (rotation.by_formula, dtype),
        (rotation.by_formula, torch.float64),
    ):
        leaf = x.to(kind).transpose(1, 2).detach().requires_grad_()
        out = made(leaf, start, 1e4)
        slope = grad.to(kind).transpose(1, 2)
        found.append([out.detach(), *torch.autograd.grad(out, leaf, slope)])
    return found


def no_worse(
    found: list[Tensor], plain: list[Tensor], right: list[Tensor], slack: float = 1e-7
) -> None:
    """Errors of at most twice those of plain torch at the same precision, and a bit of the norm."""
    for ours, theirs, exact in zip(found, plain, right, strict=True):
        assert ours.dtype == theirs.dtype
        ours = ours[..., : exact.shape[-1]]
        error, usual = ((x.double() - exact).norm() for x in (ours, theirs))
        assert error <= 2 * usual + slack * exact.norm()
