"""Ctrl-C and SIGTERM wait for the end of a step: a run cannot go on from half a step."""

import contextlib
import signal
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that Python handles are handled when the block has ended; other threads get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    waiting = {number: handler for number, handler in handlers.items() if callable(handler)}
    arrived: list[int] = []
    for number in waiting:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in waiting.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])
