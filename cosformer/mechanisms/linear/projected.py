"""Features of projections: random feature attention (Peng et al., 2021), Hedgehog (Zhang, 2024)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cosformer.check import check_positive, check_whole
from cosformer.mechanisms.linear.decay import log_gate
from cosformer.mechanisms.linear.family import LinearMechanism, Start, draw_normal
from cosformer.mechanisms.request import Request
from cosformer.ops.features import PARTS, projected


class Rfa(LinearMechanism):
    """Random Fourier features of unit vectors; sums may be negative, and are kept from zero."""

    traits = replace(LinearMechanism.traits, random=True)
    source = "Peng et al., ICLR 2021"
    formula = (
        "φ(x) = [sin Wx, cos Wx]/√m, W = σ∘N(0, I)/τ, x of norm 1, σ learned; "
        "a sum within ±eps of 0 becomes ±eps"
    )
    rule = "signed"  # max(Σ, eps) would blow up what a rare negative sum divides
    kind = "waves"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        features: int = 64,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        """`features` m: rows of W; `temperature` τ."""
        super().__init__(heads, width, key_heads=key_heads)
        self.features = check_whole("features", features, 1)
        self.temperature = check_positive("temperature", temperature)
        self.scale = nn.Parameter(torch.ones(self.key_heads, 1, width))  # σ
        self.noise: Tensor
        self.register_buffer("noise", torch.empty(self.key_heads, features, width))
        self.redraw(generator)

    @property
    def feature_width(self) -> int:
        return PARTS[self.kind] * self.features

    def redraw(self, generator: torch.Generator | None = None) -> None:
        draw_normal(self.noise, generator)

    def queries(self, q: Tensor, start: Start) -> Tensor:
        return projected(q, self.scale * self.noise / self.temperature, self.kind)

    def keys(self, k: Tensor, start: Start) -> Tensor:
        return self.queries(k, start)

    def feature_operations(self) -> int:
        return 2 * self.width * self.features + self.feature_width


class RfaArccos(Rfa):
    """Random feature attention with the arc-cosine kernel's features."""

    formula = "φ(x) = relu(Wx)/√m, W = σ∘N(0, I)/τ, x of norm 1, σ learned"
    kind = "relu"


class RfaGated(Rfa):
    """Random feature attention whose gate forgets the past."""

    traits = replace(Rfa.traits, full=False, cross=False, controls=("gate",), positions="relative")
    formula = "S_t = g_t S_{t−1} + (1 − g_t) φ(k_t) v_tᵀ, the same for Σ φ(k); g = sigmoid(gate)"
    forgets = True

    def share(self, request: Request) -> Tensor:
        return torch.sigmoid(-request.controls["gate"])  # 1 − g, without cancellation

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        return {"log_decay": log_gate(request, "gate")}


class Hedgehog(LinearMechanism):
    """Features that learn to be as pointed as softmax."""

    source = "Zhang et al., ICLR 2024"
    formula = "φ(x) = [softmax(Wx), softmax(−Wx)], W learned per head, at first the identity"

    def __init__(self, heads: int, width: int, *, key_heads: int | None = None) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        self.query_projection, self.key_projection = (
            nn.Parameter(torch.eye(width).repeat(count, 1, 1)) for count in (heads, self.key_heads)
        )

    @property
    def feature_width(self) -> int:
        return 2 * self.width

    def queries(self, q: Tensor, start: Start) -> Tensor:
        return projected(q, self.query_projection, "softmaxes")

    def keys(self, k: Tensor, start: Start) -> Tensor:
        return projected(k, self.key_projection, "softmaxes")

    def feature_operations(self) -> int:
        return 2 * self.width**2 + 10 * self.width
