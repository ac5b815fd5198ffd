"""Steps that are replayed: which ones, on what; a stand-in for CUDA's graphs runs anywhere."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cosformer.training import graph
from cosformer.training.graph import Replayed

DEVICE = torch.device("cuda:1")


class Stream:
    """What a stream is asked to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.waits = device, list["Stream"]()

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other)


class Sums:
    """An update that adds up what it is given, as a graph would: recorded once, then replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.calls, self.recorded = torch.zeros(()), 0, 0
        self._is_recording = False
        self.outside = self.stream = Stream(DEVICE)
        self.inside: list[Stream] = []  # where steps ran by themselves
        sums = self

        class Graph:
            def replay(self) -> None:
                self.kernels()

            kernels: Callable[[], None]

        @contextlib.contextmanager
        def recording(into: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
            assert (stream.device, capture_error_mode) == (DEVICE, "thread_local")
            assert not sums.inside or stream is sums.inside[-1]
            sums._is_recording = True
            yield
            sums._is_recording = False
            into.kernels = sums.last
            sums.recorded += 1

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

        @contextlib.contextmanager
        def switched(stream: Stream) -> Iterator[None]:
            sums.stream = stream
            yield
            sums.stream = sums.outside

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: sums.stream)
        monkeypatch.setattr(torch.cuda, "stream", switched)
        monkeypatch.setattr(torch.cuda, "graph", recording)

    def update(self, batch: dict[str, Tensor]) -> None:
        def kernels() -> None:
            self.total += batch["tokens"].sum()

        self.calls += 1
        self.last = kernels
        if not self._is_recording:
            assert self.stream.waits[-1] is self.outside
            self.inside.append(self.stream)
            kernels()


def batch(length: int, value: float, *, masked: bool = False) -> dict[str, Tensor]:
    found = {"tokens": torch.full((2, length), value)}
    return found | ({"mask": torch.ones(2, length, dtype=torch.bool)} if masked else {})


def test_a_shape_is_recorded_once_and_replayed_on_each_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for n in range(1, 8):
        replayed(batch(3, n))
    assert sums.calls == graph.WARM + 1
    assert sums.recorded == 1
    assert sums.total == 6 * sum(range(1, 8))


def test_steps_by_themselves_run_where_graphs_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd remembers where a parameter's gradient was made: not outside, when one records."""
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for n in range(graph.WARM + 1):
        replayed(batch(3, n))
    assert len(sums.inside) == graph.WARM
    assert sums.outside.waits == sums.inside
    assert sums.outside not in sums.inside


def test_each_shape_has_its_own_graph_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST", 2)
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for _ in range(graph.WARM + 2):
        for length in (1, 2, 3):
            replayed(batch(length, 1.0))
    assert sums.recorded == 2
    assert sums.total == (graph.WARM + 2) * 2 * (1 + 2 + 3)


def test_batches_with_a_mask_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for _ in range(graph.WARM + 2):
        replayed(batch(3, 1.0, masked=True))
    assert sums.recorded == 0
    assert sums.calls == graph.WARM + 2
