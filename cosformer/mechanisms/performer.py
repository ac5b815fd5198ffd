"""Performer ("Rethinking Attention with Performers", Choromanski et al., ICLR 2021)."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from cosformer.mechanisms.family import LinearMechanism
from cosformer.ops.problem import compute_dtype


class Performer(LinearMechanism):
    """FAVOR+: positive orthogonal random features of the softmax kernel."""

    traits = replace(LinearMechanism.traits, random=True)
    source = "Choromanski et al., ICLR 2021"
    formula = (
        "φ(x) = exp(Ωx − ‖x‖²/2)/√m, x ← x/d^¼; Ω: orthogonal rows with the norms of Gaussian ones"
    )
    eps = 1e-20  # sums of exponentials are small without being nothing

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        features: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`features` m: int(d ln d) if None."""
        super().__init__(heads, width, key_heads=key_heads)
        self.features = max(1, int(width * math.log(width))) if features is None else features
        if self.features < 1:
            raise ValueError(f"features must be at least 1, got {features}")
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(self.features, width))
        self.redraw(generator)

    @property
    def feature_width(self) -> int:
        return self.features

    def redraw(self, generator: torch.Generator | None = None) -> None:
        self.projection.copy_(orthogonal_rows(self.features, self.width, generator))

    def queries(self, q: Tensor, start: int | Tensor) -> Tensor:
        exponent = self._exponent(q)
        # It cancels in the quotient. The same of keys would not: it would tell of the future.
        exponent = exponent - exponent.detach().amax(-1, keepdim=True)
        return (exponent.exp() / self.features**0.5).to(_dtype(q))

    def keys(self, k: Tensor, start: int | Tensor) -> Tensor:
        return (self._exponent(k).exp() / self.features**0.5).to(_dtype(k))

    def feature_operations(self) -> int:
        return (2 * self.width + 3) * self.features

    def _exponent(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x.dtype)) / self.width**0.25
        return x @ self.projection.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def _dtype(x: Tensor) -> torch.dtype:
    """Of features: float16 does not reach as far as their exponentials."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def orthogonal_rows(rows: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """`[rows, width]`: blocks of orthogonal directions, each as long as a Gaussian vector."""
    device = "cpu" if generator is None else generator.device
    blocks = -(-rows // width)
    gaussian = torch.randn(2, blocks, width, width, generator=generator, device=device)
    q, r = torch.linalg.qr(gaussian[0])
    # The signs that qr leaves are not drawn, and exp(ωx) is not even in ω: a bias that stays.
    uniform = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.reshape(-1, width)
    return (uniform * gaussian[1].reshape(-1, width).norm(dim=-1, keepdim=True))[:rows]
