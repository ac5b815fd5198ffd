"""Training batches, prepared by another thread while the model learns."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cosformer.tasks import IGNORED, Batch, Task

AHEAD = 2
"""Batches that are prepared while the model learns from one."""


@dataclasses.dataclass(frozen=True)
class Fed:
    """A batch, and what is known of it without asking the device again."""

    batch: Batch
    """Without a mask where all tokens are real: models are faster then."""
    tokens: int
    """Real tokens."""
    labels: int
    """Labels that are asked for: those that are not `IGNORED`."""
    length: int
    """Tokens of a sequence, padding included."""
    ready: torch.cuda.Event | None = None


def feed(
    task: Task,
    *,
    seed: int,
    batch_size: int,
    begin: int,
    end: int,
    part: Callable[[Batch], Batch] | None = None,
) -> Iterator[Fed]:
    """Training batches of these steps, prepared by another thread, on a stream of its own.

    `part`: what this process has of a batch; counts are those of the whole. None: all of it.
    """
    device = task.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))  # until the data are there

    def prepare(step: int) -> Fed:
        with torch.cuda.stream(stream):  # does nothing on a CPU
            batch = task.batch("train", seed=seed, rank=0, step=step, batch_size=batch_size)
            fed = described(batch)
            _require_asked(task, fed)
            if part is not None:
                fed = dataclasses.replace(fed, batch=part(fed.batch))
            ready = None if stream is None else stream.record_event()
            return dataclasses.replace(fed, ready=ready)

    with ThreadPoolExecutor(1, "feed") as thread:
        ahead: list[Future[Fed]] = []
        try:
            for step in range(begin, end):
                last = min(step + 1 + AHEAD, end)
                ahead += [thread.submit(prepare, n) for n in range(step + len(ahead), last)]
                yield _received(ahead.pop(0).result())
        finally:
            for future in ahead:
                future.cancel()


def described(batch: Batch) -> Fed:
    """The batch with its counts, all masks left out if they hide nothing."""
    masks = [name for name in batch if name.startswith("mask")]
    counts = [batch[name].sum() for name in masks] + [(batch["labels"] != IGNORED).sum()]
    *tokens, labels = torch.stack(counts).tolist()
    if sum(tokens) == sum(batch[name].numel() for name in masks):
        batch = {name: tensor for name, tensor in batch.items() if name not in masks}
    return Fed(batch, sum(tokens), labels, batch["tokens"].shape[1])


def _require_asked(task: Task, fed: Fed) -> None:
    """Refuse labels that a loss would not look at, because the task says that there are none."""
    asked, samples = task.facts.asked, len(fed.batch["tokens"])
    if asked is not None and fed.labels > asked * samples:
        raise ValueError(
            f"labels must be at most {asked} in each of {samples} samples, as the facts of "
            f"{type(task).__name__} say, got {fed.labels} in all"
        )


def _received(fed: Fed) -> Fed:
    """The batch, safe to use on the current CUDA stream."""
    if fed.ready is not None:
        stream = torch.cuda.current_stream(fed.batch["tokens"].device)
        stream.wait_event(fed.ready)
        for tensor in fed.batch.values():
            tensor.record_stream(stream)
    return fed
