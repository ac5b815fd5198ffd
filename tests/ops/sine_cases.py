"""Sines and cosines by the kernels' own polynomials, and how far they may be from float64's."""

import torch
import triton
import triton.language as tl
from projected_cases import no_worse
from torch import Tensor

from cosformer.ops.sine_kernels import sine_and_cosine


@triton.jit
def sines_kernel(angle, out, N: tl.constexpr):
    place = tl.arange(0, N)
    sine, cosine = sine_and_cosine(tl.load(angle + place))
    tl.store(out + place, sine)
    tl.store(out + N + place, cosine)


def sines(angle: Tensor) -> list[Tensor]:
    """Of as many angles as a power of two."""
    out = angle.new_empty(2, angle.numel())
    sines_kernel[(1,)](angle, out, N=angle.numel())
    return list(out)


def check_sines(device: str) -> None:
    """As good as torch's up to 10³, as float32 up to 10⁴, and within ±1 as far as numbers go."""
    generator = torch.Generator().manual_seed(5)
    for furthest in (0.1, 10.0, 1e3, 1e4, 1e6, 1e8, 3e38):
        angle = (2 * torch.rand(4096, generator=generator) - 1).mul(furthest).to(device)
        found, exact = sines(angle), [angle.double().sin(), angle.double().cos()]
        error = max(float((x - y).abs().max()) for x, y in zip(found, exact, strict=True))
        assert all((x.abs() <= 1 + 1e-6).all() for x in found)
        if furthest <= 1e3:
            no_worse(found, [angle.sin(), angle.cos()], exact)
        if furthest <= 1e4:
            assert error < 3e-7
    unknown = torch.full((16,), torch.nan, device=device)
    assert all(x.isnan().all() for x in sines(unknown))
