"""What is measured at once: a shape, seen causally or in full, by those who can."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from cosformer.bench.candidates import CANDIDATES, PASSES, token_major


class Cell(NamedTuple):
    """The shape of q, k and v."""

    batch: int
    heads: int
    length: int
    width: int


@dataclass(frozen=True)
class Case:
    """A cell with its inputs, and who takes part."""

    inputs: Sequence[Tensor]
    """q, k, v, gradient of the output, each `[B, H, T, D]`."""
    causal: bool
    names: Sequence[str]
    """Candidates that take part."""
    first: str
    """Whom the others are compared with."""
    repeats: int
    device: str

    @property
    def cell(self) -> Cell:
        return Cell(*self.inputs[0].shape)

    def calls(self, pass_name: str) -> dict[str, Callable[[], object]]:
        """A call for each candidate, on inputs that lie in memory as it likes them."""
        layouts = {False: self.inputs}
        if any(CANDIDATES[name].token_major for name in self.names):
            layouts[True] = token_major(self.inputs)
        calls = {}
        for name in self.names:
            candidate = CANDIDATES[name]
            inputs = layouts[candidate.token_major]
            calls[name] = PASSES[pass_name](candidate.attend, inputs, causal=self.causal)
        return calls

    def setting(self, pass_name: str) -> dict[str, Any]:
        """What the rows of a pass have in their config."""
        at = setting(self.cell, self.causal, _dtype_name(self.inputs[0]), self.repeats)
        return at | {"pass": pass_name, "length": self.cell.length}


def setting(cell: Cell, causal: bool, dtype: str, repeats: int) -> dict[str, Any]:
    """What all rows of a run have in their config."""
    sizes: Mapping[str, int] = {"batch": cell.batch, "heads": cell.heads, "width": cell.width}
    return {**sizes, "causal": causal, "dtype": dtype, "repeats": repeats}


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
