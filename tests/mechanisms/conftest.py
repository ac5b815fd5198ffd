"""Small tensors: one thread, and chunks of eight tokens, so that there are several of them."""

import pytest
import torch

from cosformer.mechanisms import family
from cosformer.ops import delta, span


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(span, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta, "SEGMENT_LENGTH", 16)
    monkeypatch.setitem(family.SCRATCH, "cpu", 2**11)
