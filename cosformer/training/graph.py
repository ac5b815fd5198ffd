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
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        # one set of inputs for steps as they come and for replays: a compiled step that met another
        # layout when it is recorded would be compiled anew, which no recording survives
        self._inputs: dict[Shape, Batch] = {}
        # for steps that are taken as they come, too: autograd remembers where they ran
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Batch) -> None:
        shape = tuple((name, x.shape, x.dtype) for name, x in sorted(batch.items()))
        self._seen[shape] += 1
        if not self._serves(shape):
            self._take(batch)
            return
        if shape not in self._inputs:
            self._inputs[shape] = {name: x.clone() for name, x in batch.items()}
        inputs = self._inputs[shape]
        for name, tensor in inputs.items():
            tensor.copy_(batch[name])
        if self._seen[shape] <= WARM:
            self._take(inputs)
            return
        if shape not in self._graphs:
            self._graphs[shape] = self._record(inputs)
        self._graphs[shape].replay()

    def _serves(self, shape: Shape) -> bool:
        """Whether batches of this shape have inputs of their own, or get them now."""
        # the model looks at a mask on the CPU, which cannot be recorded
        hides = any(name.startswith("mask") for name, *_ in shape)
        recurs = self._seen[shape] > 1 and len(self._inputs) < MOST
        return not hides and (shape in self._inputs or recurs)

    def _take(self, batch: Batch) -> None:
        """A step by itself."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            self._update(batch)
        outside.wait_stream(self._stream)

    def _record(self, inputs: Batch) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # other threads, which prepare batches, go on meanwhile
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._update(inputs)
        return graph


def on_device(value: float, device: torch.device) -> Tensor:
    """A number where kernels read it, to be changed by `fill_`."""
    return torch.tensor(value, dtype=torch.float32, device=device)
