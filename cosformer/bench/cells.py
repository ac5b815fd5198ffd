"""What is measured together: one shape, causal or full, by every candidate that can."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer.bench.candidates import CANDIDATES, PASSES, draw, token_major


class Cell(NamedTuple):
    """The shape of q, k and v."""

    batch: int
    heads: int
    length: int
    width: int


class Setup(NamedTuple):
    """Device, type, repeats and seed: what is the same for all cells of a run."""

    device: str
    dtype: torch.dtype
    repeats: int
    seed: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def draw(self, cell: Cell, *, count: int) -> list[Tensor]:
        """Tensors of this shape."""
        return draw(cell, count, dtype=self.dtype, device=self.device, seed=self.seed)

    def config(self, cell: Cell, *, causal: bool) -> dict[str, Any]:
        """What every row of a cell has in its config."""
        sizes = {"batch": cell.batch, "heads": cell.heads, "width": cell.width}
        return {**sizes, "causal": causal, "dtype": self.dtype_name, "repeats": self.repeats}


@dataclass(frozen=True)
class Case:
    """A cell with its inputs and the candidates that take part."""

    setup: Setup
    inputs: Sequence[Tensor]
    """q, k, v, gradient of the output, each `[B, H, T, D]`."""
    causal: bool
    names: Sequence[str]
    """Candidates that take part."""

    @property
    def cell(self) -> Cell:
        return Cell(*self.inputs[0].shape)

    def calls(self, pass_name: str) -> dict[str, Callable[[], object]]:
        """A call for each candidate, on inputs in the layout that the candidate works with."""
        layouts = {False: self.inputs}
        if any(CANDIDATES[name].token_major for name in self.names):
            layouts[True] = token_major(self.inputs)
        calls = {}
        for name in self.names:
            candidate = CANDIDATES[name]
            inputs = layouts[candidate.token_major]
            calls[name] = PASSES[pass_name](candidate.attend, inputs, causal=self.causal)
        return calls

    def config(self, pass_name: str) -> dict[str, Any]:
        """What every row of a pass has in its config."""
        at = self.setup.config(self.cell, causal=self.causal)
        return at | {"pass": pass_name, "length": self.cell.length}
