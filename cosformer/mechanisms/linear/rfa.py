"""Random feature attention ("Random Feature Attention", Peng et al., ICLR 2021)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cosformer.check import check_positive, check_whole
from cosformer.mechanisms.base import Request
from cosformer.mechanisms.linear.decay import log_gate
from cosformer.mechanisms.linear.family import draw_normal
from cosformer.mechanisms.linear.projecting import ProjectingMechanism
from cosformer.ops.features.projected import MAPS


class Rfa(ProjectingMechanism):
    """Random Fourier features of unit vectors; sums may be negative, and are kept from zero."""

    traits = replace(ProjectingMechanism.traits, random=True)
    source = "Peng et al., ICLR 2021"
    formula = (
        "φ(x) = [sin Wx, cos Wx]/√m, W = σ∘N(0, I)/τ, x of norm 1, σ learned; "
        "a sum within ±eps of 0 becomes ±eps"
    )
    rule = "signed"  # max(Σ, eps) would blow up what a rare negative sum divides
    projected_map = "waves"

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
        return MAPS[self.projected_map].parts * self.features

    def redraw(self, generator: torch.Generator | None = None) -> None:
        draw_normal(self.noise, generator)

    def feature_operations(self) -> int:
        return 2 * self.width * self.features + self.feature_width

    def projections(self) -> tuple[Tensor, Tensor]:
        projection = self.scale * self.noise / self.temperature
        return projection, projection


class RfaArccos(Rfa):
    """Random feature attention with the arc-cosine kernel's features."""

    formula = "φ(x) = relu(Wx)/√m, W = σ∘N(0, I)/τ, x of norm 1, σ learned"
    projected_map = "relu"


class RfaGated(Rfa):
    """Random feature attention whose gate forgets the past."""

    traits = replace(Rfa.traits, full=False, cross=False, controls=("gate",), positions="relative")
    formula = "S_t = g_t S_{t−1} + (1 − g_t) φ(k_t) v_tᵀ, the same for Σ φ(k); g = sigmoid(gate)"

    def share(self, request: Request) -> Tensor:
        return torch.sigmoid(-request.controls["gate"])  # 1 − g, without cancellation

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        return {"log_decay": log_gate(request, "gate")}
