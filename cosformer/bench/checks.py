"""Checks that come before any timing: the op equals the formula as far as its precision allows."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cosformer.bench.candidates import Candidate, forward_backward
from cosformer.bench.inputs import Inputs, draw, draw_inputs
from cosformer.ops import State, attention, step

LENGTH = 300
"""A length of several chunks, of which the last is not full."""
LENGTHS = {"cpu": (LENGTH,), "cuda": (LENGTH, 5003)}
"""Device -> lengths that are checked: kernels cut long sequences into segments."""
ROUNDINGS = 8
"""Roundings allowed in addition: the formula in low precision is sometimes exact by luck."""
ROUNDINGS_OF_DOUBLE = 64
"""Roundings allowed in float64, where no formula is better: powers of decays err by as much."""


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
    candidate: Candidate,
    *,
    causal: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    length: int = LENGTH,
) -> list[Check]:
    """Output and gradients against the candidate's own formula, quadratic and in float64.

    Allowed is twice the error of that formula computed in `dtype`, plus a few roundings.
    """
    if candidate.formula is None:
        raise ValueError("candidate must have a formula, got one that computes something else")
    formula = replace(candidate, attend=candidate.formula)
    shape = (2, 4, length, 32)
    inputs = draw_inputs(shape, causal=causal, dtype=dtype, device=device, seed=seed)
    in_double = _cast(inputs, torch.float64)._replace(gates=inputs.gates.double())
    exact = forward_backward(formula, in_double)()
    # float64 has no better formula to be measured by: its error is that of float32, scaled
    plain_dtype = torch.float32 if dtype is torch.float64 else dtype
    plain = forward_backward(formula, _cast(inputs, plain_dtype))()
    found = forward_backward(candidate, inputs)()
    quantities = ["output", *(f"d{name}" for name in candidate.learned)]
    return [
        Check(name, _error(f, e), _allowed(_error(p, e), plain_dtype, dtype))
        for name, f, p, e in zip(quantities, found, plain, exact, strict=True)
    ]


def stream_against_full_pass(*, device: str = "cpu", seed: int = 0) -> Check:
    """Tokens given one at a time against all at once, in float32, by the same rule."""
    q, k, v = draw((2, 4, LENGTH, 32), 3, dtype=torch.float32, device=device, seed=seed)
    exact = attention(q.double(), k.double(), v.double(), causal=True, impl="reference")
    plain = attention(q, k, v, causal=True, impl="reference")
    state = State.empty(2, 4, 32, 32, horizon=LENGTH, device=device)
    with torch.no_grad():
        tokens = [step(q[:, :, t], k[:, :, t], v[:, :, t], state) for t in range(LENGTH)]
    allowed = _allowed(_error(plain, exact), torch.float32, torch.float32)
    return Check("stream", _error(torch.stack(tokens, dim=2), exact), allowed)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """All but the gates in another type; gates stay in float32 whatever that type."""
    q, k, v, gradient = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.gradient))
    return inputs._replace(q=q, k=k, v=v, gradient=gradient)


def _allowed(plain_error: float, plain_dtype: torch.dtype, dtype: torch.dtype) -> float:
    in_roundings = plain_error / torch.finfo(plain_dtype).eps
    more = ROUNDINGS_OF_DOUBLE if dtype is torch.float64 else ROUNDINGS
    return (2 * in_roundings + more) * torch.finfo(dtype).eps


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()
