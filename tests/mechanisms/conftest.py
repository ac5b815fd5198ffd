"""Chunks of eight tokens, so that small tensors have several of them; fixtures for kernels."""

import pytest
import torch

from cosformer.mechanisms.linear import delta_rule, family
from cosformer.ops.chunked import chunks as span


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(span, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta_rule, "CHUNK_LENGTH", 8)
    monkeypatch.setattr(delta_rule, "SEGMENT_LENGTH", 16)
    monkeypatch.setitem(family.SCRATCH, "cpu", 2**11)


@pytest.fixture
def poisoned():
    """Memory that nobody wrote to holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreted():
    """Triton's kernels run in Python, on the CPU."""
    if not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before Triton's import")
