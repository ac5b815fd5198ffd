"""What the sweeps of one call read in addition to their rows; made before the sweeps."""

from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.ops.problem import Given, Results, per_head
from cosformer.ops.triton.tiles import padded


class Rows(NamedTuple):
    """An operand: rows `[B, h, T, width]`, and how many heads share each of its own."""

    rows: Tensor
    group: int = 1
    relu: bool = False


class ByRow(NamedTuple):
    """What a backward pass needs of every row `[B, H, T]`; None where nothing was divided."""

    scale: Tensor | None  # 1/D
    column: Tensor | None  # δ
    deltas: Tensor | None  # δψ, `[B, H, T, 16]`


NOTHING = ByRow(None, None, None)


class Prepared:
    """What all launches for one call have in common."""

    def __init__(self, given: Given) -> None:
        q, decay, about = given.q, given.decay, given.constants
        key_mask, bounds = about.key_mask, about.bounds
        query_basis, key_basis = about.query_basis, about.key_basis
        self.rule, self.eps = given.options.rule, given.options.eps
        self.divides = self.rule != "none"
        self.batch, self.heads = q.shape[:2]
        self.states = query_basis.shape[3]
        self.device = q.device
        self.dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32  # of products
        self.query_basis, self.key_basis = query_basis.contiguous(), key_basis.contiguous()
        self.decay = None if decay is None else decay.contiguous()
        self._tiles: dict[tuple[int, bool], Tensor] = {}
        self._psi_table: Tensor | None = None
        self._sums: dict[tuple[int, int, int, bool], Tensor] = {}
        self.key_mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        self.bounds = None if bounds is None else bounds.to(torch.int64).contiguous()

    def table(self) -> Tensor | None:
        """ψ at the keys, for products with 16 rows: rounded, rounded again, and the rest."""
        if self.decay is not None:
            return None
        if self._psi_table is None:
            basis = self.key_basis
            high = basis.to(self.dtype)
            table = basis.new_zeros(*basis.shape[:3], 4, 4, dtype=self.dtype)
            table[..., :2, : self.states] = high[..., None, :]
            table[..., 2, : self.states] = basis - high.float()
            self._psi_table = table.flatten(3)
        return self._psi_table

    def added(
        self,
        rows: Rows,
        basis: Tensor,
        column: Tensor | None,
        chunk: int,
        wide: int,
        *,
        hidden: bool,
    ) -> Tensor:
        """What each chunk adds to the vectors, `[B, H, chunks, R, wide]`."""
        key = (rows.rows.data_ptr(), chunk, wide, column is None)
        if key in self._sums:
            return self._sums[key]
        from cosformer.ops.triton.kernels.prepare import sums_kernel

        length, width = rows.rows.shape[2:]
        chunks = -(-length // chunk)
        shape = (self.batch, self.heads, chunks, self.states, wide)
        added = torch.empty(shape, dtype=torch.float32, device=self.device)
        masked = hidden and self.key_mask is not None
        mask = self.key_mask if masked else rows.rows
        assert mask is not None
        sums_kernel[(self.batch * self.heads * chunks,)](
            rows.rows, basis, rows.rows if column is None else column, mask, added,
            self.heads, length, chunks, rows.group,
            *rows.rows.stride(), *per_head(basis), mask.stride(0),
            E=width, BLOCK_E=padded(width), WIDE=wide, C=chunk, R=self.states,
            RELU=rows.relu, COLUMN=column is not None, MASKED=masked,
            num_warps=max(1, padded(width) // 64),
        )  # fmt: skip
        self._sums[key] = added
        return added

    def tile(self, chunk: int, *, reverse: bool) -> Tensor | None:
        """1 − ψ(i)·ψ(j) of pairs that meet in a chunk, where all chunks have the same.

        Small numbers: 16 bits hold them better than ψ(i)·ψ(j) itself.
        """
        if self.decay is not None or self.bounds is not None:
            return None
        if (chunk, reverse) not in self._tiles:
            basis = self.query_basis[:, :, :chunk]
            basis = torch.nn.functional.pad(basis, (0, 0, 0, chunk - basis.shape[2]))
            tile = 1 - (basis[:, :, :, None] * basis[:, :, None]).sum(-1).tril()
            self._tiles[chunk, reverse] = (tile.mT if reverse else tile).to(self.dtype).contiguous()
        return self._tiles[chunk, reverse]

    def prepare(self, grad: Tensor, results: Results) -> ByRow:
        """1/D, δ and δψ of every row."""
        if not self.divides:
            return NOTHING
        from cosformer.ops.triton.kernels.prepare import prepare_kernel

        out, total = results.out, results.total
        scale, column = torch.empty_like(total, dtype=self.dtype), torch.empty_like(total)
        deltas = total.new_empty(*total.shape, 16, dtype=self.dtype)
        rows, block, basis = total.numel(), 64, self.query_basis
        if rows:
            prepare_kernel[(-(-rows // block),)](
                grad, out, total, basis, scale, column, deltas,
                rows, total.shape[1], total.shape[2], self.eps, *per_head(basis),
                *grad.stride(), *out.stride(),
                N=out.shape[3], BLOCK_N=padded(out.shape[3]), C=block, R=self.states,
                RULE=self.rule,
            )  # fmt: skip
        return ByRow(scale, column, deltas)
