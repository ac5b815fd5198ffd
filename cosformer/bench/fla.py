"""Mechanisms as flash-linear-attention computes them, measured beside ours on the same numbers."""

from importlib.util import find_spec
from typing import Any

from torch import Tensor

from cosformer.bench.peers import by_fla
from cosformer.mechanisms import (
    Delta,
    GatedDelta,
    GatedLinear,
    Mechanism,
    Request,
    Retention,
    log_gate,
)


class OfFla(Mechanism):
    """A mechanism of ours by a function of theirs, at home in `[B, T, H, D]`; causal alone."""

    function: str
    """Where in fla.ops it is."""

    def given(self, request: Request) -> dict[str, Any]:
        """The arguments of the function other than q, k and v."""
        return {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        return by_fla(self.function, q, k, v, **self.given(request))


class FlaRetention(OfFla, Retention):
    function = "retention.chunk_retention"


class FlaGatedLinear(OfFla, GatedLinear):
    function = "simple_gla.chunk_simple_gla"

    def given(self, request: Request) -> dict[str, Any]:
        return {"g": log_gate(request, "gate", self.temperature).mT}


class FlaDelta(OfFla, Delta):
    function = "delta_rule.chunk_delta_rule"

    def given(self, request: Request) -> dict[str, Any]:
        return _by_beta(request)


class FlaGatedDelta(OfFla, GatedDelta):
    function = "gated_delta_rule.chunk_gated_delta_rule"

    def given(self, request: Request) -> dict[str, Any]:
        return {**_by_beta(request), "g": self.log_decay(request).mT}


def _by_beta(request: Request) -> dict[str, Any]:
    return {"beta": request.controls["beta"].mT.sigmoid(), "use_qk_l2norm_in_kernel": True}


PEERS: dict[str, type[OfFla]] = {
    "fla-retention": FlaRetention,
    "fla-gated-linear": FlaGatedLinear,
    "fla-delta": FlaDelta,
    "fla-gated-delta": FlaGatedDelta,
}


def present(device: str) -> tuple[str, ...]:
    """The peers that can be measured there."""
    return tuple(PEERS) if device == "cuda" and find_spec("fla") else ()
