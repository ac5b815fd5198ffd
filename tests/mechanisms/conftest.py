"""Chunks of eight tokens, so that small tensors have several of them."""

import pytest

from cosformer.mechanisms import family
from cosformer.ops import delta
from cosformer.ops.chunked import chunks as span


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(span, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta, "SEGMENT_LENGTH", 16)
    monkeypatch.setitem(family.SCRATCH, "cpu", 2**11)
