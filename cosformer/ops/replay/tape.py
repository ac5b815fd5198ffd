"""Launches of a pass by the kernels of `sweep.cu`, noted while it runs, to be replayed on others.

Between the inputs of such a pass and its results there are allocations and launches alone, so a
tensor that a launch is given is an input, ψ or L, or memory that nobody has written to before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from cosformer.ops.problem import Given


class Step(NamedTuple):
    """One launch; tensors have numbers: the inputs first, then what is allocated."""

    launch: Any  # of `hopper.nvrtc`
    pointers: tuple[int, ...]  # as they were
    numbers: tuple[int | None, ...]  # None for what stays as it was: ψ, L, and no tensor
    fresh: tuple[int, ...]  # allocated before this launch


class Tape:
    """What one pass does with its inputs, if it is one that can be replayed."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = inputs
        somewhere = [(n, x) for n, x in enumerate(inputs) if x.numel()]
        self._numbers: dict[int, int | None] = {x.data_ptr(): n for n, x in somewhere}
        # Two inputs that begin at the same place could not be told apart.
        self._whole = len(self._numbers) == len(somewhere)
        self._results: list[int | None] = []
        self._passes = 0
        self.given: Given | None = None
        self.constants: list[Tensor] = []
        self.allocated: list[Tensor] = []  # kept, so that no two have the same address
        self.steps: list[Step] = []

    def run(
        self, work: Callable[[], Any], given: Given, inputs: list[Tensor], constants: list[Tensor]
    ) -> Any:
        """The pass, noted; a second one, or one on other tensors, spoils the tape."""
        known = all(self._is_input(x) for x in inputs)
        ready = known and all(x.is_contiguous() for x in constants)
        self._whole = self._whole and ready and not self._passes
        self._passes += 1
        self.given = given
        self.constants = constants
        self._numbers.update((x.data_ptr(), None) for x in constants)
        found = work()
        self._results = [self._result(x) for x in found if x is not None]
        return found

    def launched(self, launch: Any, tensors: tuple[Tensor | None, ...]) -> None:
        pointers = tuple(0 if x is None else x.data_ptr() for x in tensors)
        before = len(self.allocated)
        for x, pointer in zip(tensors, pointers, strict=True):
            if x is not None and x.numel() and pointer not in self._numbers:
                self._numbers[pointer] = len(self._inputs) + len(self.allocated)
                self.allocated.append(x)
        fresh = range(len(self._inputs) + before, len(self._inputs) + len(self.allocated))
        numbers = tuple(self._numbers.get(pointer) for pointer in pointers)
        self.steps.append(Step(launch, pointers, numbers, tuple(fresh)))

    def results(self) -> list[int] | None:
        """The numbers of what the pass returned; None if it cannot be replayed."""
        replayable = self._whole and self.steps and None not in self._results
        return self._results if replayable else None  # type: ignore[return-value]

    def _result(self, x: Tensor) -> int | None:
        """The number of a result; an empty one is allocated before the last launch."""
        if x.numel() or not self.steps:
            return self._numbers.get(x.data_ptr())
        number = len(self._inputs) + len(self.allocated)
        self.allocated.append(x)
        last = self.steps[-1]
        self.steps[-1] = last._replace(fresh=(*last.fresh, number))
        return number

    def done(self) -> list[list[int]]:
        """For each step the tensors, allocated and no results, that no later one is given."""
        last = {n: at for at, step in enumerate(self.steps) for n in step.numbers}
        kept = {None, *range(len(self._inputs)), *(self.results() or ())}
        return [[n for n in last if n not in kept and last[n] == at]  # type: ignore[misc]
                for at in range(len(self.steps))]  # fmt: skip

    def _is_input(self, x: Tensor) -> bool:
        return any(
            x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
            for y in self._inputs
        )
