"""Based ("Simple linear attention language models …", Arora et al., 2024): exp's Taylor series."""

import torch
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms.compiled import run_compiled
from cosformer.mechanisms.linear.family import LinearMechanism, Start
from cosformer.runtime import compute_dtype


class Based(LinearMechanism):
    """The Taylor series of exp to second order, on narrow projections."""

    source = "Arora et al., 2024"
    formula = (
        "φ(x) = [x_n²/√2, x_n x_m (n < m), x, 1] of x ← Px/d'^¼, "
        "so that φ(q)·φ(k) = 1 + s + s²/2, s = q·k/√d'"
    )

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, features: int = 16
    ) -> None:
        """`features` d': q and k are projected to this width if they are wider."""
        super().__init__(heads, width, key_heads=key_heads)
        self.narrow = min(check_whole("features", features, 1), width)
        self.query_projection, self.key_projection = (
            nn.Parameter(torch.randn(count, width, self.narrow) / width**0.5)
            if self.narrow < width
            else None
            for count in (heads, self.key_heads)
        )

    @property
    def feature_width(self) -> int:
        return (self.narrow + 1) * (self.narrow + 2) // 2

    def queries(self, q: Tensor, start: Start) -> Tensor:
        return run_compiled(series, q, self.query_projection, on=q)

    def keys(self, k: Tensor, start: Start) -> Tensor:
        return run_compiled(series, k, self.key_projection, on=k)

    def feature_operations(self) -> int:
        return 2 * self.width * self.narrow + self.feature_width


def series(x: Tensor, weight: Tensor | None) -> Tensor:
    """[y_n²/√2, y_n y_m, y, 1] of y = x W/N^¼, where each pair comes once.

    The product of two such rows is 1 + s + s²/2 with s = y·y′.

    Args:
        x: `[B, H, T, D]`.
        weight: W, `[H, D, N]`; None: y = x/D^¼.
    """
    y = x.to(compute_dtype(x.dtype))
    if weight is not None:
        y = y @ weight.to(y.dtype)
    narrow = y.shape[-1]
    y = y / narrow**0.25
    # Pairs by their distance around the row: halfway round, they would come a second time.
    pairs = [y * y.roll(-distance, -1) for distance in range(1, narrow // 2 + 1)]
    products = torch.cat([y.square() / 2**0.5, *pairs], -1)[..., : narrow * (narrow + 1) // 2]
    return torch.cat([products, y, torch.ones_like(y[..., :1])], -1).to(x.dtype)
