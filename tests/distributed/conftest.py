"""What a rank sends."""

import pytest
import torch.distributed as dist

from cosformer.distributed import exchange


@pytest.fixture
def sent(monkeypatch):
    """How many bytes this rank hands to a collective, one number for each call."""
    found = []

    def counted(collective, which):
        def call(*tensors, **options):
            found.append(tensors[which].nbytes)
            return collective(*tensors, **options)

        return call

    monkeypatch.setattr(exchange, "_all_gather", counted(exchange._all_gather, 1))
    monkeypatch.setattr(dist, "all_reduce", counted(dist.all_reduce, 0))
    return found
