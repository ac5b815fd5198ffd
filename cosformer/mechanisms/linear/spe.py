"""Stochastic positional encoding ("Relative Positional Encoding for Transformers with Linear
Complexity", Liutkus et al., ICML 2021): sines, over linear attention."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosformer.check import check_whole
from cosformer.mechanisms.linear.family import LinearMechanism, Start, draw_normal
from cosformer.mechanisms.request import Request
from cosformer.ops import State
from cosformer.ops.features import positions
from cosformer.runtime import compute_dtype, long_dtype


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
        """Draw the noise anew; frequencies and phases are learned."""
        draw_normal(self.noise, generator)

    def queries(self, q: Tensor, position: Tensor) -> Tensor:
        """`[B, H, T, R]` of q `[B, H, T, D]` at positions `[b, T]`, b is 1 or B."""
        return self._mixed(q, position, self.phases)

    def keys(self, k: Tensor, position: Tensor) -> Tensor:
        """`[B, H_kv, T, R]` of k `[B, H_kv, T, D]` at positions `[b, T]`, b is 1 or B."""
        return self._mixed(k, position, torch.zeros_like(self.phases))

    def _mixed(self, x: Tensor, position: Tensor, phases: Tensor) -> Tensor:
        """Σ_d x_d Σ_j Ω_j(n, d) λ_j(d) Z_j(d)/(D R)^¼; Ω are all cosines, then all sines.

        Sines turn by up to half a turn a token; the gains λ of a dimension have norm 1. Heads come
        first, so that one product reads Z once for the whole batch.
        """
        gain = F.softplus(self.gains.to(compute_dtype(x.dtype)))
        gain = (gain / gain.norm(dim=-1, keepdim=True))[:, None, None]
        rate = math.pi * self.frequencies.double().sigmoid()
        angle = rate[:, None, None] * position[..., None, None] + phases[:, None, None]
        dtype = long_dtype(x)
        omega = torch.cat([angle.cos().to(gain) * gain, angle.sin().to(gain) * gain], -1)
        rows = x.to(dtype).unflatten(1, (len(self.noise), -1)).transpose(0, 1)  # [h, B, g, T, D]
        terms = rows.contiguous()[..., None] * omega.to(dtype)[:, :, None]  # [h, B, g, T, D, 2K]
        width, columns = self.noise.shape[1], self.noise.shape[3]
        matrix = self.noise.flatten(1, 2) * (width * columns) ** -0.25  # [h, D·2K, R]
        sums = terms.flatten(4).flatten(1, 3) @ matrix.to(dtype)
        return sums.unflatten(1, rows.shape[1:4]).transpose(0, 1).flatten(1, 2).to(x.dtype)


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

    def advance_sums(
        self, q: Tensor, k: Tensor, v: Tensor, sums: State, request: Request
    ) -> tuple[Tensor, State]:
        if request.key_mask is not None:
            none_yet = (sums.position == 0).expand(k.shape[0])
            padding = torch.where(none_yet, _padding_in_front(request.key_mask), 0)
            sums = sums._replace(position=sums.position - padding)
        return super().advance_sums(q, k, v, sums, request)

    def queries(self, q: Tensor, start: Start) -> Tensor:
        return self.encoding.queries(q, positions(start, q.shape[2], q))

    def keys(self, k: Tensor, start: Start) -> Tensor:
        return self.encoding.keys(k, positions(start, k.shape[2], k))

    def feature_operations(self) -> int:
        return 4 * self.width * self.sines * self.feature_width

    def _features(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, start: Start, key_start: Start
    ) -> tuple[Tensor, Tensor, Tensor]:
        if request.key_mask is not None and isinstance(key_start, int):
            padding = _padding_in_front(request.key_mask)
            start, key_start = start - padding, key_start - padding
        return super()._features(q, k, v, request, start, key_start)


def _padding_in_front(key_mask: Tensor) -> Tensor:
    """`[B]`: tokens before the first real one."""
    return (key_mask.cumsum(1) == 0).sum(1)
