"""Steps of training as CUDA graphs: recorded once for batches of a shape, then replayed.

A small model is done before Python has asked for its next kernel; a replay asks for all at once.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from cosformer.tasks import Batch

WARM = 3
"""Steps of a shape that are taken as they come: libraries set themselves up in the first ones."""
MOST = 8
"""Shapes that are recorded: each keeps its own memory."""

Shape = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Replayed:
    """A function of batches that reads and writes the same tensors each time.

    What it depends on beside the batch must lie in tensors, as they are when it is replayed.
    """

    def __init__(self, update: Callable[[Batch], None], device: torch.device) -> None:
        self._update, self._device = update, device
        self._seen: Counter[Shape] = Counter()
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        # for steps that are taken as they come, too: autograd remembers where they ran
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Batch) -> None:
        shape = tuple((name, x.shape, x.dtype) for name, x in sorted(batch.items()))
        self._seen[shape] += 1
        if shape not in self._graphs:
            if not self._is_due(shape, batch):
                self._take(batch)
                return
            self._graphs[shape] = self._record(batch)
        graph, inputs = self._graphs[shape]
        for name, tensor in inputs.items():
            tensor.copy_(batch[name])
        graph.replay()

    def _is_due(self, shape: Shape, batch: Batch) -> bool:
        # the model looks at a mask on the CPU, which cannot be recorded
        hides = any(name.startswith("mask") for name in batch)
        return not hides and self._seen[shape] > WARM and len(self._graphs) < MOST

    def _take(self, batch: Batch) -> None:
        """A step by itself."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            self._update(batch)
        outside.wait_stream(self._stream)

    def _record(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch]:
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        # other threads, which prepare batches, go on meanwhile
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._update(inputs)
        return graph, inputs


def on_device(value: float, device: torch.device) -> Tensor:
    """A number where kernels read it, to be changed by `fill_`."""
    return torch.tensor(value, dtype=torch.float32, device=device)
