"""Quick benchmarks: samples of one call, and no garbage collected after each of many failures."""

import pytest

from cosformer.bench import timing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing.gc, "collect", lambda *_: 0)
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
