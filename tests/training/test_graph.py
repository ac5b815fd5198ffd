"""Steps that are replayed: which ones, on what; a stand-in for CUDA's graphs runs anywhere."""

import contextlib
from types import SimpleNamespace

import torch

from cosformer.training import graph
from cosformer.training.graph import Replayed

DEVICE = torch.device("cuda:1")


class Stream:
    """What a stream is asked to wait for."""

    def __init__(self, device):
        self.device, self.waits = device, []

    def wait_stream(self, other):
        self.waits.append(other)


class Sums:
    """An update that adds up what it is given, as a graph would: recorded once, then replayed."""

    def __init__(self, monkeypatch):
        self.total, self.calls, self.recorded = torch.zeros(()), 0, 0
        self.outside = self.stream = Stream(DEVICE)
        self.inside, self.is_recording = [], False  # where steps ran by themselves
        self.laid = []  # where the tokens of every call lay, and how
        fakes = {"CUDAGraph": SimpleNamespace, "Stream": Stream, "stream": self.switched}
        fakes |= {"graph": self.recording, "current_stream": lambda device: self.stream}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextlib.contextmanager
    def recording(self, into, stream, capture_error_mode):
        assert (stream.device, capture_error_mode) == (DEVICE, "thread_local")
        assert not self.inside or stream is self.inside[-1]
        self.is_recording = True
        yield
        self.is_recording = False
        into.replay = self.last
        self.recorded += 1

    @contextlib.contextmanager
    def switched(self, stream):
        self.stream = stream
        yield
        self.stream = self.outside

    def update(self, batch):
        def kernels():
            self.total += batch["tokens"].sum()

        self.calls += 1
        self.laid.append((batch["tokens"].data_ptr(), batch["tokens"].stride()))
        self.last = kernels
        if not self.is_recording:
            assert self.stream.waits[-1] is self.outside
            self.inside.append(self.stream)
            kernels()


def batch(length, value):
    return {"tokens": torch.full((2, length), value)}


def test_a_shape_is_recorded_once_and_replayed_on_each_batch(monkeypatch):
    """Steps before run where graphs are recorded: autograd remembers where gradients were made."""
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for n in range(1, 8):
        replayed(batch(3, n))
    assert (sums.calls, sums.recorded, sums.total) == (graph.WARM + 1, 1, 6 * sum(range(1, 8)))
    assert len(sums.inside) == graph.WARM
    assert sums.outside.waits == sums.inside
    assert sums.outside not in sums.inside


def test_each_shape_has_its_own_graph_up_to_a_number(monkeypatch):
    monkeypatch.setattr(graph, "MOST", 2)
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for _ in range(graph.WARM + 2):
        for length in (1, 2, 3):
            replayed(batch(length, 1.0))
    assert sums.recorded == 2
    assert sums.total == (graph.WARM + 2) * 2 * (1 + 2 + 3)


def test_shapes_that_do_not_recur_take_nobodys_place(monkeypatch):
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for length in range(1, 2 * graph.MOST):
        replayed(batch(length, 1.0))
    for _ in range(graph.WARM + 1):
        replayed(batch(99, 1.0))
    assert sums.recorded == 1


def test_batches_with_a_mask_are_not_recorded(monkeypatch):
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for _ in range(graph.WARM + 2):
        replayed({**batch(3, 1.0), "mask": torch.ones(2, 3, dtype=torch.bool)})
    assert (sums.recorded, sums.calls) == (0, graph.WARM + 2)


def test_a_step_is_recorded_on_the_tensors_that_the_steps_before_had(monkeypatch):
    """A compiled step that meets another layout is compiled anew, which no recording survives."""
    sums = Sums(monkeypatch)
    replayed = Replayed(sums.update, DEVICE)
    for n in range(graph.WARM + 2):
        replayed({"tokens": torch.full((2, 4), n)[:, 1:]})
    assert len(sums.laid) == graph.WARM + 1
    assert len(set(sums.laid[1:])) == 1  # the first step cannot know that there will be more
