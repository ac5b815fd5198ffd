"""What a rank sends, and when it does what."""

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


@pytest.fixture
def note(monkeypatch):
    """`note(where, name, word)` lets a function add a word to `note.seen` when it is called; with
    the dtype of what it returns, also when its backward pass begins."""
    seen = []

    def note(where, name, word, dtype=None):
        function = getattr(where, name)

        def noted(*given, **options):
            seen.append(word)
            out = function(*given, **options)
            if dtype is not None:
                first = out[0] if isinstance(out, list) else out
                assert first.dtype == dtype
                first.register_hook(lambda _: seen.append(word))
            return out

        monkeypatch.setattr(where, name, noted)

    note.seen = seen
    return note
