"""Matrices of logarithms whose columns are normalised over the rows so far."""

import torch

from cosformer.ops import running_share

SCALES = [1.0, 60.0]  # exponentials of the second do not fit into float32


def plain(x):
    future = torch.ones_like(x, dtype=torch.bool).triu(1)
    x = x.masked_fill(future, running_share.LOWEST)
    return x - x.logcumsumexp(-2)


def results(by, x, grad):
    """Shares at and below the diagonal, those above it, and the gradient."""
    leaf = x.detach().requires_grad_()
    out = by(leaf)
    (slope,) = torch.autograd.grad(out, leaf, grad.to(out.dtype))
    seen = torch.ones_like(x, dtype=torch.bool).tril()
    return out.detach().masked_fill(~seen, 0), out.detach()[~seen], slope


def check_shares(size, scale, device="cpu"):
    """Errors of at most twice those of plain torch; what stands above the diagonal is nothing."""
    x = scale * torch.randn(1, 2, size, size, generator=torch.Generator().manual_seed(4))
    grad = torch.linspace(-1, 1, x.numel()).view(x.shape).to(device)
    x = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), torch.nan).to(device)
    made = ((running_share.by_kernel, x), (plain, x), (running_share.by_formula, x.double()))
    found, usual, right = (results(by, given, grad.tril()) for by, given in made)
    assert (found[1] == running_share.LOWEST).all()
    rounding = torch.finfo(torch.float32).eps
    for n in (0, 2):
        error, allowed = (found[n] - right[n]).norm(), 2 * (usual[n] - right[n]).norm()
        assert error <= allowed + rounding * right[n].norm()
