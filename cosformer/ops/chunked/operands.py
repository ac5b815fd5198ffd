"""q, k and v as a sweep loads them."""

import torch
from torch import Tensor

from cosformer.ops.chunked.chunks import Span, fold
from cosformer.ops.chunked.workspace import Into, placed
from cosformer.ops.problem.features import FEATURE_MAPS
from cosformer.runtime import compute_dtype, recorded


class Operands:
    """A span at a time, in full precision, mapped and masked; states for every head, and back."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        feature_map: str,
        rule: str,
    ) -> None:
        self._q, self._k, self._v, self._key_mask = q, k, v, key_mask
        self._map = FEATURE_MAPS[feature_map].forward
        self._normalised = rule != "none"
        self.groups = q.shape[1] // k.shape[1]
        self.dtype = compute_dtype(q.dtype)

    def q(self, span: Span, into: Into) -> Tensor:
        return self._mapped(fold(self._q, span).to(self.dtype), into)

    def k(self, span: Span, into: Into) -> Tensor:
        return self.hide(self._mapped(self._repeat(self.keys(span)), into), span)

    def keys(self, span: Span) -> Tensor:
        """Before φ; zeros at masked keys where φ is differentiated: its slope at NaN is NaN."""
        rows = fold(self._k, span).to(self.dtype)
        return self.hide(rows, span) if recorded() else rows

    def v(self, span: Span, into: Into) -> Tensor:
        """[v 1], whose last column sums the weights; v alone where nothing is divided."""
        values = self._repeat(self.hide(fold(self._v, span).to(self.dtype), span))
        ones = values.new_ones(()).expand(*values.shape[:-1], 1) if self._normalised else None
        return placed(values, into, column=ones)

    def hide(self, rows: Tensor, span: Span) -> Tensor:
        """Zeros at masked keys, whatever stood there."""
        if self._key_mask is None:
            return rows
        return rows.masked_fill(~fold(self._key_mask[:, None, :, None], span), 0)

    def _mapped(self, rows: Tensor, into: Into) -> Tensor:
        return self._map(rows, into(rows.shape[-1]))

    def spread(self, state: Tensor | None, states: int) -> Tensor:
        """A state `[B, Hkv, R, D, V]` for every query head; zeros for None."""
        if state is not None:
            return self._repeat(state.to(self.dtype))
        batch, heads, _, width = self._q.shape
        shape = (batch, heads, states, width, self._v.shape[-1] + self._normalised)
        return torch.zeros(shape, dtype=self.dtype, device=self._q.device)

    def spread_last(self, grad: Tensor | None, like: Tensor) -> Tensor:
        """The gradient of `last[:, ::groups]`: it belongs to the first head of each group."""
        if grad is None:
            return torch.zeros_like(like)
        if self.groups == 1:
            return grad
        others = torch.zeros_like(grad)[:, :, None].expand(-1, -1, self.groups - 1, -1, -1, -1)
        return torch.cat([grad[:, :, None], others], 2).flatten(1, 2)

    def sum_groups(self, grad: Tensor) -> Tensor:
        return grad if self.groups == 1 else grad.unflatten(1, (-1, self.groups)).sum(2)

    def _repeat(self, rows: Tensor) -> Tensor:
        return rows if self.groups == 1 else rows.repeat_interleave(self.groups, 1)
