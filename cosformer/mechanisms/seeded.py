"""Randomness that is a function of one number: the same for any length, and small to save."""

import torch
from torch import Tensor

from cosformer.mechanisms.base import Mechanism
from cosformer.ops.check import check_whole

SEEDS = 2**31


class Seeded(Mechanism):
    """The seed is saved with the parameters, and drawn anew by `redraw` alone."""

    seed: int

    def plant(self, seed: int) -> None:
        self.seed = check_whole("seed", seed, 0)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        device = "cpu" if generator is None else generator.device
        self.seed = int(torch.randint(SEEDS, (), generator=generator, device=device))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seed)

    def set_extra_state(self, state: Tensor) -> None:
        self.seed = int(state)
