"""Who is measured: one table of attention functions, and the tensors they are given."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cosformer.ops import attention


class Attend(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor: ...


@dataclass(frozen=True)
class Candidate:
    """An attention function on `[B, H, T, D]` and what must be known to measure it fairly."""

    attend: Attend
    is_cosformer: bool
    """It must agree with the formula of cosFormer before it is timed."""
    is_quadratic: bool
    """Its time grows with the square of the length: measured up to a limit only."""


def _softmax(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


CANDIDATES: dict[str, Candidate] = {
    "chunked": Candidate(functools.partial(attention, impl="chunked"), True, False),
    "reference": Candidate(functools.partial(attention, impl="reference"), True, True),
    "sdpa": Candidate(_softmax, False, True),
}


def require_known(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in CANDIDATES]
    if unknown or not names:
        raise ValueError(f"candidates must be among {', '.join(CANDIDATES)}, got {list(names)}")


def draw(
    shape: Sequence[int], count: int, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> list[Tensor]:
    """`count` normal tensors, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(count)]


def forward(attend: Attend, inputs: Sequence[Tensor], *, causal: bool) -> Callable[[], object]:
    """One forward pass as in inference. `inputs`: q, k, v, gradient of the output."""
    q, k, v, _ = inputs

    @torch.no_grad()
    def call() -> Tensor:
        return attend(q, k, v, causal=causal)

    return call


def forward_backward(
    attend: Attend, inputs: Sequence[Tensor], *, causal: bool
) -> Callable[[], tuple[Tensor, ...]]:
    """One forward and one backward pass. Returns the output and the gradients of q, k, v."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

    def call() -> tuple[Tensor, ...]:
        out = attend(q, k, v, causal=causal)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])

    return call


PASSES = {"forward": forward, "forward_backward": forward_backward}
