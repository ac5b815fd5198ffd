"""Calls that repeat an earlier one: its decisions serve again, forward and backward."""

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from cosformer.ops.autograd.function import attend, differentiable
from cosformer.ops.problem import (
    Asked,
    Constants,
    Given,
    Gradients,
    Grads,
    Options,
    Results,
)
from cosformer.runtime import recorded, refuse_older_vmap

if TYPE_CHECKING:
    from cosformer.ops.hopper import Tape


class Repeated:
    """Passes by Hopper's kernels, on plain tensors that nothing traces.

    All tensors that it is called with must have the shapes, strides, dtypes, device and alignment
    of the first ones. Its passes are noted as tapes when they are first taken.
    """

    def __init__(self, decay: Tensor | None, constants: Constants, options: Options) -> None:
        """`decay`: L, if it is the same for all calls."""
        self._decay, self._constants, self._options = decay, constants, options
        self._tapes: dict[Any, Tape | None] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Tensor:
        """The output. `gates`: log γ of each token, where every token has its own."""
        if forward_ad._current_level >= 0:
            return attend(self.given(q, k, v, gates))[0]
        learns = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (gates is not None and gates.requires_grad)
        )
        if not learns:
            return self.forward(q, k, v, gates).out
        # skips the binding of arguments and functorch: 40 µs
        out: Tensor = super(Function, _Repeated).apply(q, k, v, gates, self)
        return out

    def given(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Given:
        """The whole problem."""
        decay = self._decay if gates is None else gates
        return Given(q, k, v, decay, None, self._constants, self._options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Results:
        rows = [q, k, v] if gates is None else [q, k, v, gates]
        if (tape := self._tapes.get("forward")) is not None:
            return Results(*tape(rows))  # type: ignore[arg-type]
        from cosformer.ops import hopper
        from cosformer.ops.autograd import kernels

        given = self.given(q, k, v, gates)
        if "forward" in self._tapes or _overlap(rows):
            return kernels.forward(given)
        found, self._tapes["forward"] = hopper.on_tape(
            lambda: hopper.forward(given), rows, self._fixed
        )
        return Results(*found)  # type: ignore[arg-type]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, results: Results,
        grad: Tensor, asked: Asked,
    ) -> Gradients:  # fmt: skip
        rows = [q, k, v, grad, results.out, results.total]
        rows += [x for x in (gates, results.kept, results.fading) if x is not None]
        # hooks of saved tensors may give back others than those that were saved
        key = (asked, *map(Tensor.stride, rows), _start(rows))
        if (tape := self._tapes.get(key)) is not None:
            return Gradients(*tape(rows))
        from cosformer.ops import hopper
        from cosformer.ops.autograd import kernels

        given = self.given(q, k, v, gates)
        grads = Grads(grad, None, None)
        grouped = q.shape[1] != k.shape[1]  # whose gradients are summed by torch
        if key in self._tapes or grouped or _overlap(rows):
            return kernels.backward(given, results, grads, asked)

        def swept() -> Gradients:
            found = hopper.backward_with_decay(given, results, grads, asked)
            return Gradients(found.q, found.k, found.v, found.decay)

        found, self._tapes[key] = hopper.on_tape(swept, rows, self._fixed)
        return Gradients(*found)

    @property
    def _fixed(self) -> list[Tensor | None]:
        return [self._decay, *self._constants]


class _Repeated(Function):
    """(q, k, v, gates, the call) -> out."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, by: Repeated
    ) -> Tensor:
        out, total, _, kept, fading = by.forward(q, k, v, gates)
        ctx.by = by
        ctx.save_for_backward(q, k, v, gates, out, total, kept, fading)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_older_vmap(grad)
        q, k, v, gates, out, total, kept, fading = ctx.saved_tensors
        *needed, _ = ctx.needs_input_grad
        asked = Asked(*needed)
        if recorded():
            given = ctx.by.given(q, k, v, gates)
            found = differentiable(lambda x: attend(x)[0], given, grad, asked)
        else:
            results = Results(out, total, None, kept, fading)
            found = ctx.by.backward(q, k, v, gates, results, grad, asked)
        return found.q, found.k, found.v, found.decay, None


def _start(rows: list[Tensor]) -> int:
    """Where tensors begin, modulo 16 bytes; 0 where all begin at multiples of them."""
    return functools.reduce(operator.or_, (x.data_ptr() for x in rows)) % 16


def _overlap(rows: list[Tensor]) -> bool:
    """Whether two tensors are one: a tape could not tell which of them a kernel was given."""
    return len({x.data_ptr() for x in rows}) < len(rows)
