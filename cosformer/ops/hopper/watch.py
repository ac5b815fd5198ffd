"""Somebody may watch the passes and launches of this thread, in order to repeat them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from cosformer.ops.problem import Given

_here = threading.local()


class Watcher(Protocol):
    """Who watches."""

    def run(
        self, work: Callable[[], Any], given: Given, inputs: list[Tensor], constants: list[Tensor]
    ) -> Any:
        """Do the work of a pass over these tensors; `constants` stay the same when repeated."""

    def launched(self, launch: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """A kernel is launched on these tensors."""


def watcher() -> Watcher | None:
    """Who watches this thread, if anybody."""
    return getattr(_here, "watcher", None)


@contextmanager
def watching(by: Watcher) -> Iterator[None]:
    """Let somebody watch what this thread launches."""
    before, _here.watcher = watcher(), by
    try:
        yield
    finally:
        _here.watcher = before
