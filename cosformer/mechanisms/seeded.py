"""Random choices that follow from a seed: the same whenever they are made, and small to save."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from cosformer.check import check_generator, check_seed
from cosformer.mechanisms.base import Mechanism

SEEDS = 2**31

Draw = TypeVar("Draw", bound=Callable[..., Any])


def drawn_before(draw: Draw) -> Draw:
    """Mark a function that draws: a graph takes its result for a constant of its arguments.

    A length among them must be a number and no symbol: `operator.index` makes it one.
    """
    # torch.compiler.assume_constant_result does this alone, but loads all of torch._dynamo
    draw._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return draw


class Seeded(Mechanism):
    """A mechanism with a seed, which is saved with the parameters and changed by `redraw` alone."""

    seed: int

    def plant(self, seed: int) -> None:
        self.seed = check_seed(seed)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        check_generator(generator)
        device = "cpu" if generator is None else generator.device
        self.seed = int(torch.randint(SEEDS, (), generator=generator, device=device))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seed)

    def set_extra_state(self, state: Tensor) -> None:
        self.seed = int(state)
