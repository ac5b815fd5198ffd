"""Which gradients a backward pass is asked for: sweeps that serve none of them are left out."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Asked(NamedTuple):
    """Of q, k, v, the decay and the state, in the order in which a backward returns them."""

    q: bool
    k: bool
    v: bool
    decay: bool = False
    state: bool = False

    @property
    def sweeps_q(self) -> bool:
        """A decay's gradient is made up of φ(q)·dφ(q), and of the same for k."""
        return self.q or self.decay

    @property
    def sweeps_k(self) -> bool:
        """By kernels the sweep for dk ends with the state's gradient."""
        return self.k or self.decay or self.state

    @property
    def reverse(self) -> bool:
        """Whether anything is swept from the end."""
        return self.sweeps_k or self.v

    def only(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of q, k and v, None for those that were made for another or not at all."""
        asked = (self.q, self.k, self.v)
        return [x if each else None for x, each in zip(found[:3], asked, strict=True)]
