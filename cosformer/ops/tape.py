"""Launches of a pass by the kernels of `hopper.cu`, noted while it runs, to be replayed on others.

Between the inputs of such a pass and its results there are allocations and launches alone, so a
tensor that a launch is given is an input, ψ, or memory that nobody has written to before.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from cosformer.ops.nvrtc import Launch

R = TypeVar("R")
BASES = slice(6, 8)  # where a pass is given ψ at the queries and at the keys

_here = threading.local()


class Step(NamedTuple):
    """One launch; tensors have numbers: the inputs first, then what is allocated."""

    launch: "Launch"
    pointers: tuple[int, ...]  # as they were
    numbers: tuple[int | None, ...]  # None for what stays as it was: ψ, and no tensor
    fresh: tuple[int, ...]  # allocated before this launch


class Tape:
    """What one pass does with its inputs, if it is one that can be replayed."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = inputs
        self._numbers: dict[int, int | None] = {x.data_ptr(): n for n, x in enumerate(inputs)}
        # Two inputs that begin at the same place could not be told apart.
        self._whole = len(self._numbers) == len(inputs)
        self._results: tuple[Tensor | None, ...] = ()
        self.arguments: tuple[Any, ...] = ()
        self.allocated: list[Tensor] = []  # kept, so that no two have the same address
        self.steps: list[Step] = []

    def run(self, function: Callable[..., R], arguments: tuple[Any, ...]) -> R:
        """The pass, noted; a second one, or one on other tensors, spoils the tape."""
        bases = arguments[BASES]
        others = (*arguments[: BASES.start], *arguments[BASES.stop :])
        known = all(self._is_input(x) for x in others if isinstance(x, Tensor))
        ready = known and all(x.is_contiguous() for x in bases)
        self._whole = self._whole and ready and not self.arguments
        self.arguments = arguments
        self._numbers.update((x.data_ptr(), None) for x in bases)
        found = function(*arguments)
        self._results = found  # type: ignore[assignment]
        return found

    def launched(self, launch: "Launch", tensors: tuple[Tensor | None, ...]) -> None:
        pointers = tuple(0 if x is None else x.data_ptr() for x in tensors)
        before = len(self.allocated)
        for x, pointer in zip(tensors, pointers, strict=True):
            if x is not None and pointer not in self._numbers:
                self._numbers[pointer] = len(self._inputs) + len(self.allocated)
                self.allocated.append(x)
        fresh = range(len(self._inputs) + before, len(self._inputs) + len(self.allocated))
        numbers = tuple(self._numbers.get(pointer) for pointer in pointers)
        self.steps.append(Step(launch, pointers, numbers, tuple(fresh)))

    def results(self) -> list[int] | None:
        """The numbers of what the pass returned; None if it cannot be replayed."""
        found = [self._numbers.get(x.data_ptr()) for x in self._results if x is not None]
        replayable = self._whole and self.steps and None not in found
        return found if replayable else None  # type: ignore[return-value]

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


def current() -> Tape | None:
    return getattr(_here, "tape", None)


@contextmanager
def taping(*inputs: Tensor) -> Iterator[Tape]:
    """A tape of what this thread launches."""
    before, _here.tape = current(), Tape(inputs)
    try:
        yield _here.tape
    finally:
        _here.tape = before


def taped(function: Callable[..., R]) -> Callable[..., R]:
    """A pass over q, k, v, a decay, a state, a mask and ψ, in this order, and more."""

    @functools.wraps(function)
    def run(*arguments: Any) -> R:
        tape = current()
        return function(*arguments) if tape is None else tape.run(function, arguments)

    return run
