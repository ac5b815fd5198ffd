"""Which gradients a backward pass is asked for: sweeps that serve none of them are left out."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


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
        """The sweep for dk ends with the state's gradient."""
        return self.k or self.decay or self.state

    @property
    def reverse(self) -> bool:
        """Whether anything is swept from the end."""
        return self.sweeps_k or self.v

    def only(self, found: Sequence[T | None]) -> list[T | None]:
        """Gradients of q, k and v, None for those that were made for another or not at all."""
        return [x if asked else None for x, asked in zip(found[:3], self[:3], strict=True)]
