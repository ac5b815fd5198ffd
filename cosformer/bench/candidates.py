"""Who is measured: one table of attention functions, and what one pass of each is."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cosformer.bench.inputs import Inputs, as_drawn, gates_per_column, token_major
from cosformer.bench.peers import (
    fla_cosine,
    fla_linear,
    fla_retention,
    fla_with_gates,
    softmax,
    softmax_by,
)
from cosformer.ops import attention, multiscale_decays

Attend = Callable[[Inputs], Tensor]
"""An attention function: its output is `[B, H, T, D]`."""


@dataclass(frozen=True)
class Candidate:
    """An attention function and what must be known to measure it fairly."""

    attend: Attend
    formula: Attend | None = None
    """The quadratic formula of what it computes; None if that is not cosFormer. A candidate of
    this package must agree with its formula to be timed."""
    is_quadratic: bool = False
    """Whether its time grows with the square of the length. It is then measured up to a limit."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Devices that it runs on."""
    package: str | None = None
    """The package that it comes from, where that is not this one."""
    causal_only: bool = False
    """Whether it can attend causally only."""
    packs: bool = False
    """Whether it takes sequences that are packed end to end."""
    has_gates: bool = False
    """Whether each token has a decay of its own. The gates then get a gradient, and their bytes
    count as moved."""
    prepare: Callable[[Inputs], Inputs] = as_drawn
    """What is done to inputs before the clock starts: the memory layout that it works with."""

    @property
    def is_present(self) -> bool:
        return self.package is None or find_spec(self.package) is not None

    @property
    def learned(self) -> tuple[str, ...]:
        """The inputs that get a gradient."""
        return ("q", "k", "v", "gates") if self.has_gates else ("q", "k", "v")


def _no_decay(inputs: Inputs) -> dict[str, Any]:
    return {}


def _decay_per_head(inputs: Inputs) -> dict[str, Any]:
    return {"decay": _decays(inputs.k.shape[1])}


def _decay_per_token(inputs: Inputs) -> dict[str, Any]:
    return {"log_decay": inputs.gates}


_decays = functools.cache(multiscale_decays)  # a layer keeps its decays, too


def _cosformer(inputs: Inputs, *, impl: str, decay: Callable[[Inputs], dict[str, Any]]) -> Tensor:
    return attention(
        inputs.q,
        inputs.k,
        inputs.v,
        causal=inputs.causal,
        cu_seqlens=inputs.cu_seqlens,
        impl=impl,
        **decay(inputs),
    )


def _ours(
    impl: str, decay: Callable[[Inputs], dict[str, Any]] = _no_decay, **about: Any
) -> Candidate:
    formula = functools.partial(_cosformer, impl="reference", decay=decay)
    attend = functools.partial(_cosformer, impl=impl, decay=decay)
    return Candidate(attend, formula, packs=True, **about)


def _softmax_on_cuda(backend: SDPBackend) -> Candidate:
    attend = functools.partial(softmax_by, backend=backend)
    return Candidate(attend, is_quadratic=True, devices=("cuda",))


def _of_fla(
    attend: Attend, prepare: Callable[[Inputs], Inputs] = token_major, **about: Any
) -> Candidate:
    about |= {"devices": ("cuda",), "package": "fla", "causal_only": True}
    return Candidate(attend, prepare=prepare, **about)


CANDIDATES: dict[str, Candidate] = {
    "auto": _ours("auto", devices=("cuda",)),
    "chunked": _ours("chunked"),
    "reference": _ours("reference", is_quadratic=True),
    "decay": _ours("auto", _decay_per_head),
    "gates": _ours("auto", _decay_per_token, has_gates=True),
    "sdpa": Candidate(softmax, is_quadratic=True),
    "sdpa_flash": _softmax_on_cuda(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": _softmax_on_cuda(SDPBackend.CUDNN_ATTENTION),
    "fla_cos": _of_fla(
        fla_cosine, formula=functools.partial(_cosformer, impl="reference", decay=_no_decay)
    ),
    "fla_linear": _of_fla(functools.partial(fla_linear, function="chunk_linear_attn"), packs=True),
    "fla_fused": _of_fla(
        functools.partial(fla_linear, function="fused_chunk_linear_attn"), packs=True
    ),
    "fla_retention": _of_fla(fla_retention, packs=True),
    "fla_simple_gla": _of_fla(
        functools.partial(fla_with_gates, function="simple_gla.chunk_simple_gla"),
        packs=True,
        has_gates=True,
    ),
    "fla_gla": _of_fla(
        functools.partial(fla_with_gates, function="gla.chunk_gla"),
        gates_per_column,
        packs=True,
        has_gates=True,
    ),
}


def forward(candidate: Candidate, inputs: Inputs) -> Callable[[], object]:
    """One forward pass as in inference."""

    @torch.no_grad()
    def call() -> Tensor:
        return candidate.attend(inputs)

    return call


def forward_backward(candidate: Candidate, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """One forward and one backward pass. Returns the output and the gradients of `learned`."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in candidate.learned}
    given = inputs._replace(**leaves)

    def call() -> tuple[Tensor, ...]:
        out = candidate.attend(given)
        return out.detach(), *torch.autograd.grad(out, tuple(leaves.values()), inputs.gradient)

    return call


PASSES = {"forward": forward, "forward_backward": forward_backward}
