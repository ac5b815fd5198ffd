"""Chunks of eight tokens, so that small tensors have several of them."""

import pytest

from cosformer.mechanisms.linear import delta_rule, family
from cosformer.ops.chunked import chunks as span


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(span, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta_rule, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta_rule, "SEGMENT_LENGTH", 16)
    monkeypatch.setitem(family.SCRATCH, "cpu", 2**11)
