"""Position schemes that an attention layer puts around any mechanism; `POSITIONS` names them."""

import math

import torch
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms import SinePositions, check_rotary
from cosformer.ops.features import positions, rotate
from cosformer.runtime import untraced

STRETCH = 256
"""Positions after which sines and cosines are made as products."""


class Positions(nn.Module):
    """What a scheme does to tokens, queries and keys; a subclass changes some of it."""

    def __init__(self, embed_dim: int, head_dim: int, key_heads: int, max_length: int | None):
        super().__init__()
        self.head_dim = head_dim

    @property
    def key_width(self) -> int:
        """The width of the queries and keys that the mechanism receives."""
        return self.head_dim

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        """Tokens `[B, T, E]`, the first at `start`, as the projections to q and k see them."""
        return x

    def encode(
        self, q: Tensor, k: Tensor, query_start: int | Tensor, key_start: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """q `[B, H, T, D]` and k `[B, H_kv, S, D]` as the mechanism sees them.

        Their first tokens stand at these positions, a number or `[B]`, one for each stream.
        """
        return q, k


class Learned(Positions):
    """A learned vector per position, added to what q and k are projected from."""

    def __init__(self, embed_dim: int, head_dim: int, key_heads: int, max_length: int | None):
        super().__init__(embed_dim, head_dim, key_heads, max_length)
        if max_length is None:
            raise ValueError("max_length must be given for learned positions, got None")
        check_whole("max_length", max_length, 1)
        self.table = nn.Parameter(0.02 * torch.randn(max_length, embed_dim))

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        if isinstance(start, Tensor):
            return x + self.table[positions(start, x.shape[1], x).long()]
        end = start + x.shape[1]
        if end > len(self.table):
            raise ValueError(f"length must be at most max_length={len(self.table)}, got {end}")
        return x + self.table[start:end]


class Sinusoidal(Positions):
    """Sines and cosines of the position, added to what q and k are projected from."""

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        return x + sinusoids_from(start, x)


class Rotary(Positions):
    """Pairs of q and k turned by an angle that grows with the position."""

    base = 1e4
    """What is turned by position · base^(−2n/width) is pair n."""

    def __init__(self, embed_dim: int, head_dim: int, key_heads: int, max_length: int | None):
        super().__init__(embed_dim, head_dim, key_heads, max_length)
        check_rotary(head_dim, self.base)

    def encode(
        self, q: Tensor, k: Tensor, query_start: int | Tensor, key_start: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        return (
            rotate(q, positions(query_start, q.shape[2], q), self.base),
            rotate(k, positions(key_start, k.shape[2], k), self.base),
        )


class Stochastic(Positions):
    """Stochastic positional encoding: q and k become 64 stochastic sums of sines."""

    realizations = 64

    def __init__(self, embed_dim: int, head_dim: int, key_heads: int, max_length: int | None):
        super().__init__(embed_dim, head_dim, key_heads, max_length)
        self.sines = SinePositions(key_heads, head_dim, realizations=self.realizations, sines=5)

    @property
    def key_width(self) -> int:
        return self.realizations

    def encode(
        self, q: Tensor, k: Tensor, query_start: int | Tensor, key_start: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        queries = self.sines.queries(q, positions(query_start, q.shape[2], q))
        return queries, self.sines.keys(k, positions(key_start, k.shape[2], k))


POSITIONS: dict[str, type[Positions]] = {
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "rotary": Rotary,
    "spe": Stochastic,
}


def sinusoids(position: Tensor, width: int) -> Tensor:
    """sin and cos of position / 10⁴^(2n/width) in turn, in float64 (Vaswani et al., 2017).

    Positions of any shape `[...]` give `[..., width]`.
    """
    angle = _angles(position, width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


def sinusoids_from(start: int | Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` × sinusoids of the positions of x `[B, T, width]`, `[b, T, width]` like x.

    Positions follow each other from `start` on, a number or `[B]`, one for each stream.
    """
    length, width = x.shape[1:]
    # a compiler makes one kernel of the formula
    if not untraced() or length <= STRETCH:
        return (scale * sinusoids(positions(start, length, x), width)).to(x.dtype)
    # sin(a+b) + i·cos(a+b) = (sin a + i·cos a)(cos b − i·sin b): one pass instead of nine, and as
    # exact, for it is float64 as well
    firsts = _angles(positions(start, length, x)[:, ::STRETCH], width)[:, :, None]
    others = _angles(torch.arange(STRETCH, device=x.device), width)
    waves = torch.complex(firsts.sin(), firsts.cos()).mul_(scale)
    waves = waves * torch.complex(others.cos(), -others.sin())  # [b, T / 256, 256, width / 2]
    return torch.view_as_real(waves).to(x.dtype).flatten(3).flatten(1, 2)[:, :length, :width]


def _angles(position: Tensor, width: int) -> Tensor:
    """Positions `[...]` / 10⁴^(2n/width) for each n `[..., width / 2]`, in float64."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=position.device)
    return position.double()[..., None] * torch.exp(-math.log(1e4) * pairs / width)
