"""Linear attention that forgets: a decay per head, or a gate per token."""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from cosformer.check import check_positive
from cosformer.mechanisms.linear.family import LinearMechanism
from cosformer.mechanisms.request import Request, hide
from cosformer.runtime import compute_dtype

FORGETFUL = replace(
    LinearMechanism.traits,
    full=False,
    cross=False,
    positions="relative",
    normalised=False,
    norm_after=True,
)


class Retention(LinearMechanism):
    """Retention: a decay per head in place of a denominator, a norm after it."""

    traits = FORGETFUL
    source = "Sun et al., 2023; lightning attention: Qin et al., 2024"
    formula = "S_t = γ_h S_{t−1} + k_t v_tᵀ, out_t = S_tᵀ q_t/√d, γ_h = 1 − 2^(−5−h)"
    normaliser = "none"
    forgets = True

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        rates = [1 - 2.0 ** (-5 - head) for head in range(self.key_heads)]
        return {"gamma": rates, "scale": 1 / math.sqrt(self.width)}


class GatedLinear(LinearMechanism):
    """Gated linear attention: one forgetting number per token and head."""

    traits = replace(FORGETFUL, controls=("gate",))
    source = "Yang et al., 2023; scalar gate: Dao and Gu, 2024 (Mamba-2)"
    formula = "S_t = g_t S_{t−1} + k_t v_tᵀ, out_t = S_tᵀ q_t/√d, g = sigmoid(gate)^(1/τ)"
    normaliser = "none"
    forgets = True

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, temperature: float = 16.0
    ) -> None:
        """`temperature` τ: the larger, the longer the memory."""
        super().__init__(heads, width, key_heads=key_heads)
        self.temperature = check_positive("temperature", temperature)

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        log_decay = log_gate(request, "gate", self.temperature)
        return {"log_decay": log_decay, "scale": 1 / math.sqrt(self.width)}


def log_gate(request: Request, name: str, temperature: float = 1.0) -> Tensor:
    """log sigmoid(control)/τ in float32 at least; 0, that is no decay, at masked tokens."""
    gate = request.controls[name]
    found = F.logsigmoid(gate.to(compute_dtype(gate.dtype)).contiguous())  # as graphs take it to be
    return hide(found if temperature == 1 else found / temperature, request.key_mask)
