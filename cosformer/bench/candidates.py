"""Who is measured: one table of attention functions, and the tensors they are given."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cosformer.bench.peers import fla_cosine, fla_linear, softmax, softmax_by
from cosformer.ops import attention


class Attend(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor: ...


@dataclass(frozen=True)
class Candidate:
    """An attention function on `[B, H, T, D]` and what must be known to measure it fairly."""

    attend: Attend
    is_cosformer: bool
    """Whether it computes cosFormer. If it is ours, it must agree with the formula to be timed."""
    is_quadratic: bool
    """Whether its time grows with the square of the length. It is then measured up to a limit."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Devices that it runs on."""
    package: str | None = None
    """The package that it comes from, where that is not this one."""
    causal_only: bool = False
    """Whether it can attend causally only."""
    token_major: bool = False
    """Whether its own layout is `[B, T, H, D]`: inputs then lie so in memory before it is timed."""

    @property
    def is_present(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


def _ours(impl: str) -> Attend:
    return functools.partial(attention, impl=impl)


def _with_decay(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """cosFormer with a decay per head, from ½ to nearly 1."""
    heads = q.shape[1]
    rates = [1 - 2 ** (-1 - 7.5 * head / max(1, heads - 1)) for head in range(heads)]
    return attention(q, k, v, causal=causal, decay=rates)


def _with_gates(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """cosFormer with a decay per token, in float32; all are the same, which costs as much."""
    gates = _gates(q.shape[0], k.shape[1], k.shape[2], q.device)
    return attention(q, k, v, causal=causal, log_decay=gates)


@functools.lru_cache(1)
def _gates(batch: int, heads: int, length: int, device: torch.device) -> Tensor:
    return torch.full((batch, heads, length), -0.05, device=device)


def _softmax_on_cuda(backend: SDPBackend) -> Candidate:
    return Candidate(functools.partial(softmax_by, backend=backend), False, True, ("cuda",))


def _of_fla(attend: Attend, *, is_cosformer: bool = False) -> Candidate:
    return Candidate(
        attend, is_cosformer, False, ("cuda",), package="fla", causal_only=True, token_major=True
    )


CANDIDATES: dict[str, Candidate] = {
    "auto": Candidate(_ours("auto"), True, False, ("cuda",)),
    "chunked": Candidate(_ours("chunked"), True, False),
    "reference": Candidate(_ours("reference"), True, True),
    "sdpa": Candidate(softmax, False, True),
    "decay": Candidate(_with_decay, False, False),
    "gates": Candidate(_with_gates, False, False),
    "sdpa_flash": _softmax_on_cuda(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": _softmax_on_cuda(SDPBackend.CUDNN_ATTENTION),
    "fla_cos": _of_fla(fla_cosine, is_cosformer=True),
    "fla_linear": _of_fla(functools.partial(fla_linear, function="chunk_linear_attn")),
    "fla_fused": _of_fla(functools.partial(fla_linear, function="fused_chunk_linear_attn")),
}


def require_known(names: Sequence[str], device: str) -> None:
    known = [name for name, candidate in CANDIDATES.items() if device in candidate.devices]
    if not names or not set(names) <= set(known):
        raise ValueError(f"candidates must be among {', '.join(known)}, got {list(names)}")


def draw(
    shape: Sequence[int], count: int, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> list[Tensor]:
    """`count` normal tensors, drawn where they are used: a billion numbers take long on a CPU."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = (torch.randn(*shape, generator=generator, device=device) for _ in range(count))
    return [x.to(dtype) for x in drawn]


def token_major(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same `[B, H, T, D]`, in memory as `[B, T, H, D]`."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]


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
