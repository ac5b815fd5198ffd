"""Correctness, looked at before any speed: is it the formula, as well as its precision allows?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cosformer.bench.candidates import Attend, draw, forward_backward
from cosformer.ops import State, attention, step

QUANTITIES = ("output", "dq", "dk", "dv")
LENGTH = 300
"""Several chunks, and the last one not full."""


@dataclass(frozen=True)
class Check:
    """An error relative to the largest true value, and how large it may be."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def __str__(self) -> str:
        verdict = "is within" if self.passed else "exceeds"
        return f"{self.name}: error {self.error:.1e} {verdict} {self.allowed:.1e}"


def against_formula(
    attend: Attend, *, causal: bool, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> list[Check]:
    """Output and gradients against the quadratic formula in float64.

    Allowed is twice the error of that formula computed in `dtype`, plus four roundings.
    """
    inputs = draw((2, 4, LENGTH, 32), 4, dtype=dtype, device=device, seed=seed)
    exact = forward_backward(_formula, [x.double() for x in inputs], causal=causal)()
    plain = forward_backward(_formula, inputs, causal=causal)()
    found = forward_backward(attend, inputs, causal=causal)()
    rounding = 4 * torch.finfo(dtype).eps
    return [
        Check(name, _error(f, e), 2 * _error(p, e) + rounding)
        for name, f, p, e in zip(QUANTITIES, found, plain, exact, strict=True)
    ]


def stream_against_full_pass(*, device: str = "cpu", seed: int = 0) -> Check:
    """Tokens given one at a time against all at once, in float32, by the same rule."""
    q, k, v = draw((2, 4, LENGTH, 32), 3, dtype=torch.float32, device=device, seed=seed)
    exact = attention(q.double(), k.double(), v.double(), causal=True, impl="reference")
    plain = attention(q, k, v, causal=True, impl="reference")
    state = State.empty(2, 4, 32, 32, horizon=LENGTH, device=device)
    with torch.no_grad():
        tokens = [step(q[:, :, t], k[:, :, t], v[:, :, t], state) for t in range(LENGTH)]
    allowed = 2 * _error(plain, exact) + 4 * torch.finfo(torch.float32).eps
    return Check("stream", _error(torch.stack(tokens, dim=2), exact), allowed)


def _formula(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return attention(q, k, v, causal=causal, impl="reference")


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()
