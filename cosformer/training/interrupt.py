"""Ctrl-C and SIGTERM wait for the end of a step: a run cannot go on from half a step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, Any], Any]


@contextlib.contextmanager
def handled_by(handler: Handler) -> Iterator[dict[int, Handler]]:
    """Signals that Python handles go to this handler in the block; yields those of before.

    Threads other than the main one get no signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    before: dict[int, Handler] = {n: each for n, each in found.items() if callable(each)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals are handled when the block has ended."""
    arrived: list[int] = []
    with handled_by(lambda number, _: arrived.append(number)):
        yield
    if arrived:
        signal.raise_signal(arrived[0])
