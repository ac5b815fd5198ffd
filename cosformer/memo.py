"""Tensors that follow from lengths and numbers alone, kept for the next call.

Positions, angles and lists of blocks take a dozen small launches on a GPU: more time on the host
than short attention takes on the device.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cosformer.runtime import eager

ENTRIES = 32


class Numbers(tuple[float, ...]):
    """A tuple of numbers, by which two calls can be compared, as they cannot by a tensor."""


KINDS = {bool, int, float, str, type(None), Numbers}
"""The types of values by which calls are compared."""

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """Values, each kept under what it was made from, once for each device and stream."""

    def __init__(self, lasts: Callable[[Value], bool] = lambda _: True) -> None:
        """Values for which `lasts` is false are not kept."""
        self._lasts = lasts
        self.kept: dict[Any, Value] = {}
        self._lock = threading.Lock()
        self._captured: dict[int, Value] = {}  # a CUDA graph reads their memory while it lives

    def recall_for(
        self,
        x: Tensor,
        values: tuple[Any, ...],
        make: Callable[[], Value],
    ) -> Value:
        """What `make` returns for a call on x, made once for the same values and dtype.

        Only numbers and names tell calls apart: with a tensor among the values, or while something
        traces the call, nothing is kept.
        """
        kinds = tuple(map(type, values))
        if not KINDS.issuperset(kinds) or x.is_meta or not eager(x):
            return make()
        return self.recall((values, kinds, x.dtype), x.device, make)  # kinds: True equals 1

    def recall(
        self,
        alike: Hashable,
        device: torch.device,
        make: Callable[[], Value],
    ) -> Value:
        """What `make` returns, from the memo if `alike` was asked for before.

        What is made while a CUDA graph is captured is not kept.
        """
        alike = (alike, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Whatever stream made it has finished: a capture begins with all of them at rest.
            found = next((kept for key, kept in list(self.kept.items()) if key[0] == alike), None)
            if found is None:
                return make()
            self._captured[id(found)] = found
            return found
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        found = self.kept.get((alike, stream))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = make()
            if self._lasts(found):
                with self._lock:
                    while len(self.kept) >= ENTRIES:
                        self.kept.pop(next(iter(self.kept)))
                    self.kept[alike, stream] = found
        return found
