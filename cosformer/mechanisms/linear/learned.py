"""Linear attention on features that are learned, or wide, so as to come close to softmax."""

import torch
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms.linear.family import LinearMechanism
from cosformer.mechanisms.linear.projecting import ProjectingMechanism
from cosformer.mechanisms.linear.series import is_served, series, series_width


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
        return series_width(self.narrow)

    def queries(self, q: Tensor, start: int | Tensor) -> Tensor:
        return series(q, self.query_projection)

    def keys(self, k: Tensor, start: int | Tensor) -> Tensor:
        return series(k, self.key_projection)

    def made_at_once(self, x: Tensor) -> bool:
        return is_served(x, self.narrow)

    def feature_operations(self) -> int:
        return 2 * self.width * self.narrow + self.feature_width


class Hedgehog(ProjectingMechanism):
    """Features that learn to be as pointed as softmax."""

    source = "Zhang et al., ICLR 2024"
    formula = "φ(x) = [softmax(Wx), softmax(−Wx)], W learned per head, at first the identity"
    projected_map = "softmaxes"

    def __init__(self, heads: int, width: int, *, key_heads: int | None = None) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.query_projection, self.key_projection = (
            nn.Parameter(torch.eye(width).repeat(count, 1, 1)) for count in (heads, self.key_heads)
        )

    @property
    def feature_width(self) -> int:
        return 2 * self.width

    def projections(self) -> tuple[Tensor, Tensor]:
        return self.query_projection, self.key_projection

    def feature_operations(self) -> int:
        return 2 * self.width**2 + 10 * self.width
