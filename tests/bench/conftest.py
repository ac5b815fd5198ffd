"""Failures are many here: collecting the garbage of each would take most of the time."""

import pytest

from cosformer.bench import timing


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch):
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)
