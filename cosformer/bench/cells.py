"""What is measured together: the sizes of one problem, and every candidate that can take it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cosformer.bench.candidates import CANDIDATES, PASSES
from cosformer.bench.inputs import Inputs, draw, draw_inputs

SHORTEST_DRAWN = 16
"""The least length that is drawn for sequences of different lengths."""


class Cell(NamedTuple):
    """Sizes of q, k and v, and whether the sequences are packed end to end."""

    batch: int
    heads: int
    length: int
    width: int
    key_heads: int | None = None
    """Heads of k and v, where that is fewer than those of q."""
    packing: Literal["packed", "drawn"] | None = None
    """`packed`: all sequences in a batch of one, told apart by `cu_seqlens`. `drawn`: the same,
    with lengths drawn from 16 to `length`."""

    @property
    def name(self) -> str:
        """What `--cells` calls it, as 8x16x4096x64-grouped."""
        sizes = f"{self.batch}x{self.heads}x{self.length}x{self.width}"
        kinds = ["grouped"] if self.key_heads else []
        return "-".join([sizes, *kinds, *([self.packing] if self.packing else [])])

    def lengths(self, seed: int) -> list[int]:
        """The length of each sequence."""
        if self.packing != "drawn":
            return [self.length] * self.batch
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(SHORTEST_DRAWN, self.length + 1, (self.batch,), generator=generator)
        return list(drawn.tolist())


CELLS = {
    cell.name: cell
    for cell in (
        Cell(8, 16, 1024, 64),
        Cell(8, 16, 2048, 64),
        Cell(8, 16, 4096, 64),
        Cell(2, 16, 16384, 64),
        Cell(1, 16, 65536, 64),
        Cell(2, 8, 16384, 128),
        Cell(4, 12, 3000, 64),
        Cell(8, 16, 1024, 64, key_heads=4),
        Cell(8, 16, 4096, 64, key_heads=4),
        Cell(64, 16, 1024, 64),
        Cell(64, 16, 1024, 64, packing="packed"),
        Cell(64, 16, 4096, 64, packing="drawn"),
        Cell(1, 16, 1048576, 64),
    )
}
"""Name -> cell: what a GPU is measured by. Each one is in memory twice, for two layouts."""


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
        """Tensors of one size for every query head."""
        shape = (cell.batch, cell.heads, cell.length, cell.width)
        return draw(shape, count, dtype=self.dtype, device=self.device, seed=self.seed)

    def inputs(self, cell: Cell) -> Inputs:
        """The inputs of a cell, causal."""
        lengths = cell.lengths(self.seed) if cell.packing else None
        batch, length = (1, sum(lengths)) if lengths else (cell.batch, cell.length)
        return draw_inputs(
            (batch, cell.heads, length, cell.width),
            causal=True,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            key_heads=cell.key_heads,
            lengths=lengths,
        )

    def config(self, cell: Cell, *, causal: bool) -> dict[str, Any]:
        """What every row of a cell has in its config."""
        found: dict[str, Any] = {"batch": cell.batch, "heads": cell.heads, "width": cell.width}
        found |= {"causal": causal, "dtype": self.dtype_name, "repeats": self.repeats}
        if cell.key_heads:
            found["key_heads"] = cell.key_heads
        if cell.packing:
            found |= {"packing": cell.packing, "tokens": sum(cell.lengths(self.seed))}
        return found


@dataclass(frozen=True)
class Case:
    """A cell with its inputs and the candidates that take part."""

    setup: Setup
    cell: Cell
    inputs: Inputs
    names: Sequence[str]
    """Candidates that take part."""

    def calls(self, pass_name: str) -> dict[str, Callable[[], object]]:
        """A call for each candidate, on inputs in the layout that the candidate works with."""
        candidates = {name: CANDIDATES[name] for name in self.names}
        layouts = {each.prepare for each in candidates.values()}
        prepared = {prepare: prepare(self.inputs) for prepare in layouts}
        measured = PASSES[pass_name]
        return {name: measured(each, prepared[each.prepare]) for name, each in candidates.items()}

    def config(self, pass_name: str) -> dict[str, Any]:
        """What every row of a pass has in its config."""
        at = self.setup.config(self.cell, causal=self.inputs.causal)
        return at | {"pass": pass_name, "length": self.cell.length}
