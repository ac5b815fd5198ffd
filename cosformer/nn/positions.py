"""Position schemes that an attention layer puts around any mechanism; `POSITIONS` names them."""

import math

import torch
from torch import Tensor, nn

from cosformer.check import check_whole
from cosformer.mechanisms import SinePositions, check_rotary
from cosformer.ops.features import rotate


class Positions(nn.Module):
    """What a scheme does to tokens, queries and keys; a subclass changes some of it."""

    def __init__(self, embed_dim: int, head_dim: int, key_heads: int, max_length: int | None):
        super().__init__()
        self.head_dim = head_dim

    @property
    def key_width(self) -> int:
        """The width of the queries and keys that the mechanism receives."""
        return self.head_dim

    def embed(self, x: Tensor, start: int) -> Tensor:
        """Tokens `[B, T, E]`, the first at `start`, as the projections to q and k see them."""
        return x

    def encode(
        self, q: Tensor, k: Tensor, query_start: int, key_start: int
    ) -> tuple[Tensor, Tensor]:
        """q `[B, H, T, D]` and k `[B, H_kv, S, D]` as the mechanism sees them."""
        return q, k


class Learned(Positions):
    """A learned vector per position, added to what q and k are projected from."""

    def __init__(self, embed_dim: int, head_dim: int, key_heads: int, max_length: int | None):
        super().__init__(embed_dim, head_dim, key_heads, max_length)
        if max_length is None:
            raise ValueError("max_length must be given for learned positions, got None")
        check_whole("max_length", max_length, 1)
        self.table = nn.Parameter(0.02 * torch.randn(max_length, embed_dim))

    def embed(self, x: Tensor, start: int) -> Tensor:
        end = start + x.shape[1]
        if end > len(self.table):
            raise ValueError(f"length must be at most max_length={len(self.table)}, got {end}")
        return x + self.table[start:end]


class Sinusoidal(Positions):
    """Sines and cosines of the position, added to what q and k are projected from."""

    def embed(self, x: Tensor, start: int) -> Tensor:
        position = start + torch.arange(x.shape[1], device=x.device)
        return x + sinusoids(position, x.shape[2]).to(x.dtype)


class Rotary(Positions):
    """Pairs of q and k turned by an angle that grows with the position."""

    def __init__(self, embed_dim: int, head_dim: int, key_heads: int, max_length: int | None):
        super().__init__(embed_dim, head_dim, key_heads, max_length)
        check_rotary(head_dim, 1e4)

    def encode(
        self, q: Tensor, k: Tensor, query_start: int, key_start: int
    ) -> tuple[Tensor, Tensor]:
        return (
            rotate(q, _index(query_start, q)),
            rotate(k, _index(key_start, k)),
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
        self, q: Tensor, k: Tensor, query_start: int, key_start: int
    ) -> tuple[Tensor, Tensor]:
        queries = self.sines.queries(q, _index(query_start, q))
        return queries, self.sines.keys(k, _index(key_start, k))


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
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=position.device)
    angle = position.double()[..., None] * torch.exp(-math.log(1e4) * pairs / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


def _index(start: int, x: Tensor) -> Tensor:
    """The positions `[1, T]` of `[B, H, T, D]`, of which the first is `start`."""
    return start + torch.arange(x.shape[2], dtype=torch.float64, device=x.device)[None]
