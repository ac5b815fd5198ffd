"""Lets a watcher record the passes and kernel launches of a thread, in order to repeat them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from cosformer.ops.problem import Given

_here = threading.local()


class Watcher(Protocol):
    """An object that is told of every pass and every kernel launch of a thread."""

    def run(
        self, work: Callable[[], Any], given: Given, inputs: list[Tensor], constants: list[Tensor]
    ) -> Any:
        """Do the work of a pass over these tensors; `constants` stay the same when repeated."""

    def launched(self, launch: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """A kernel is launched on these tensors."""


def watcher() -> Watcher | None:
    """The watcher of this thread; None if there is none."""
    return getattr(_here, "watcher", None)


@contextmanager
def watching(by: Watcher) -> Iterator[None]:
    """Within the block, `by` is told of the passes and launches of this thread."""
    before, _here.watcher = watcher(), by
    try:
        yield
    finally:
        _here.watcher = before
