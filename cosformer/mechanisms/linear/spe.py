"""Stochastic positional encoding ("Relative Positional Encoding for Transformers with Linear
Complexity", Liutkus et al., ICML 2021): sines, over linear attention."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosformer.check import check_whole
from cosformer.mechanisms.base import Request
from cosformer.mechanisms.linear.family import LinearMechanism, draw_normal
from cosformer.ops import State
from cosformer.ops.features.rotary import positions
from cosformer.mechanisms.linear.sines import Sines, is_served, mixed
from cosformer.ops.state import check_state


class SinePositions(nn.Module):
    """q̂ and k̂ whose products are, on average, Σ_d q_d k_d P_d(i − j), P_d a sum of sines.

    `noise` Z is the same for queries and keys; it is drawn once, and anew by `redraw` alone.
    """

    def __init__(
        self,
        key_heads: int,
        width: int,
        *,
        realizations: int,
        sines: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.realizations = check_whole("realizations", realizations, 1)
        shape = (key_heads, width, check_whole("sines", sines, 1))
        frequencies, phases = (draw_normal(torch.empty(shape), generator) for _ in range(2))
        self.frequencies = nn.Parameter(frequencies - 4)  # most sines begin slow
        self.phases = nn.Parameter(phases)
        self.gains = nn.Parameter(torch.zeros(shape))
        self.noise: Tensor
        self.register_buffer("noise", torch.empty(key_heads, width, 2 * sines, realizations))
        self.redraw(generator)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """The noise anew; frequencies and phases are learned."""
        draw_normal(self.noise, generator)

    def queries(self, q: Tensor, position: Tensor) -> Tensor:
        """`[B, H, T, R]` of q `[B, H, T, D]` at positions `[b, T]`, b is 1 or B."""
        return mixed(q, position, self._sines(self.phases), self.noise)

    def keys(self, k: Tensor, position: Tensor) -> Tensor:
        return mixed(k, position, self._sines(torch.zeros_like(self.phases)), self.noise)

    def _sines(self, phases: Tensor) -> Sines:
        """Up to half a turn a token; gains of a dimension have norm 1."""
        gain = F.softplus(self.gains)
        rate = math.pi * self.frequencies.double().sigmoid()
        return Sines(rate, phases, gain / gain.norm(dim=-1, keepdim=True))


class Spe(LinearMechanism):
    """Stochastic sines as positions, over linear attention with features 1 + elu.

    Only in the mean do weights depend on i − j alone, so positions count from the first real key:
    padding in front does not shift them. Queries stand among the keys, of whatever sequence.
    """

    traits = replace(LinearMechanism.traits, positions="absolute", random=True)
    source = "Liutkus et al., ICML 2021"
    formula = (
        "q̂_i = Σ_d q_id Ω_i(f_d, θ_d) λ_d Z_d/(d R)^¼, ‖λ_d‖ = 1, k̂_j the same with θ = 0; "
        "then linear attention on φ = 1 + elu of q̂ and k̂"
    )
    feature_map = "1+elu"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        realizations: int = 256,
        sines: int = 5,
        generator: torch.Generator | None = None,
    ) -> None:
        """`realizations` R: the width of q̂ and k̂; `sines`: per dimension and head."""
        super().__init__(heads, width, key_heads=key_heads)
        self.encoding = SinePositions(
            self.key_heads, width, realizations=realizations, sines=sines, generator=generator
        )
        self.sines = sines

    @property
    def feature_width(self) -> int:
        return self.encoding.realizations

    @property
    def scratch_width(self) -> int:
        return 6 * self.width * self.sines + self.feature_width

    def redraw(self, generator: torch.Generator | None = None) -> None:
        self.encoding.redraw(generator)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, State]:
        check_state(state)
        if request.key_mask is None:
            return super().advance(q, k, v, state, request)
        none_yet = (state.position == 0).expand(k.shape[0])
        padding = torch.where(none_yet, _padding_in_front(request.key_mask), 0)
        begun = state._replace(position=state.position - padding)
        return super().advance(q, k, v, begun, request)

    def queries(self, q: Tensor, start: int | Tensor) -> Tensor:
        return self.encoding.queries(q, positions(start, q.shape[2], q))

    def keys(self, k: Tensor, start: int | Tensor) -> Tensor:
        return self.encoding.keys(k, positions(start, k.shape[2], k))

    def made_at_once(self, x: Tensor) -> bool:
        return is_served(x)

    def feature_operations(self) -> int:
        return 4 * self.width * self.sines * self.feature_width

    def _features(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        request: Request,
        query_start: int | Tensor,
        key_start: int | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if request.key_mask is not None and isinstance(key_start, int):
            padding = _padding_in_front(request.key_mask)
            query_start, key_start = query_start - padding, key_start - padding
        return super()._features(q, k, v, request, query_start, key_start)


def _padding_in_front(key_mask: Tensor) -> Tensor:
    """`[B]`: tokens before the first real one."""
    return (key_mask.cumsum(1) == 0).sum(1)
