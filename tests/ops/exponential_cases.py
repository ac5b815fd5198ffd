"""Sums of exponentials at sizes for tests, divided as Performer divides them, and their formula."""

from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.ops.exponentials import sums_of_exponentials
from cosformer.ops.features.projected import by_formula, top_exponents
from cosformer.ops.features.quotient import quotient

EPS = 1e-30  # Performer's


class Case(NamedTuple):
    length: int = 300
    causal: bool = True
    features: int = 266
    keys: int | None = None
    width: int = 64  # of v
    stored: torch.dtype = torch.float32
    spread: float = 1.0  # of q and k
    masked: bool = False
    turned: bool = False  # in memory tokens come before heads
    fades: bool = False

    def draw(self, batch=2, heads=4, device="cuda"):
        """q, k and v, rounded; W, both levels, a mask and a decay; a gradient."""
        generator = torch.Generator().manual_seed(5)

        def normal(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        keys = self.keys or self.length
        q, k = (self.spread * normal(batch, heads, n, 64) for n in (self.length, keys))
        v = normal(batch, heads, keys, self.width)
        if self.turned:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        mask = None
        if self.masked:
            mask = torch.rand(batch, keys, generator=generator).to(device) < 0.7
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        weight = normal(self.features, 64, dtype=self.stored)
        levels = top_exponents(q, weight), top_exponents(k, weight)[..., :1].expand(k.shape[:3])
        decay = None
        if self.fades:
            steps = torch.rand(batch, heads, keys, generator=generator)
            decay = -3 * steps.where(steps > 0.7, 0).to(device)  # mostly, nothing rises
        grad = normal(batch, heads, self.length, self.width)
        return [q, k, v], (weight, levels, mask, decay), grad

    def fused(self, q, k, v, weight, levels, mask, decay):
        sums, totals = sums_of_exponentials(q, k, v, weight, levels, mask, self.causal, decay)
        return quotient(sums, totals, self.width, "clamp", EPS)

    def plain(self, q, k, v, weight, levels, mask, decay):
        """The quadratic formula in the dtype of its inputs."""
        pairs = zip((q, k), levels, strict=True)
        queries, keys = (by_formula(x, weight, "exp", level) for x, level in pairs)
        score = queries @ keys.mT
        score = score if mask is None else score * mask[:, None, None]
        if decay is not None:
            since = decay.double().cumsum(-1)
            left = (since[..., :, None] - since[..., None, :]).clamp(max=0)
            score = score * left.exp().to(score.dtype)
        score = score.tril() if self.causal else score
        return score @ v / score.sum(-1, keepdim=True).clamp(min=EPS)


def results(call, leaves: list[Tensor], about: tuple, grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = call(*leaves, *about)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
