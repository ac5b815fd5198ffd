"""For tests of kernels, and of calls that are replayed in C++."""

import fcntl
import shutil

import pytest
import stub_driver
import torch

from cosformer.ops.hopper import nvrtc
from cosformer.ops.hopper import plan as hopper_plan
from cosformer.ops.problem import PROBLEMS
from cosformer.ops.replay import native, replay


def pytest_collection_modifyitems(items):
    """Tests of the replay wait for g++, half a minute."""
    for item in items:
        if "host" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def poisoned():
    """Memory that nobody wrote to holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 3, 5])
def segments(request, monkeypatch):
    """Into how many the kernels for Hopper cut a sequence, if it is long enough."""

    def choose(programs, length, processors, **_):
        return max(1, min(request.param, length // 64))

    monkeypatch.setattr(hopper_plan, "choose_segments", choose)
    monkeypatch.setattr(hopper_plan, "_plans", {})
    return request.param


@pytest.fixture
def interpreted():
    """Triton's kernels run in Python, on the CPU."""
    if not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before Triton's import")


@pytest.fixture(scope="session")
def host(request, tmp_path_factory):
    """A build of `host.cpp`, made once (half a minute) and kept with pytest's cache, if any."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with pytest.MonkeyPatch.context() as patch:
        cache = getattr(request.config, "cache", None)
        folder = cache.mkdir("native") if cache else tmp_path_factory.mktemp("native")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        with open(folder / "lock", "w") as lock:  # of all processes that run tests, one builds
            fcntl.flock(lock, fcntl.LOCK_EX)
            return native._import(native.build())


@pytest.fixture
def driver(monkeypatch, host):
    driver = stub_driver.install(monkeypatch)
    addresses = (native._address(driver.launch), native._address(driver.is_capturing))
    host.connect(*addresses, "cpu", nvrtc.mend_launch)
    monkeypatch.setattr(replay, "_programs", {})
    monkeypatch.setattr(PROBLEMS, "kept", {})
    monkeypatch.setattr(replay, "loaded_for", lambda q: host)
    return driver


@pytest.fixture
def ordinary(monkeypatch):
    """Counts the calls that were not replayed."""
    calls = []

    def count(where, name):
        own = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *given: (calls.append(1), own(*given))[1])

    count(stub_driver.cosine, "_attention")
    count(stub_driver.linear, "_linear_attention")
    return calls
