"""For tests of calls that are replayed in C++."""

import fcntl
import shutil

import pytest

from cosformer.ops import native


@pytest.fixture(scope="session")
def host(request):
    """A build of `host.cpp`, made once (half a minute) and kept with pytest's cache."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with pytest.MonkeyPatch.context() as patch:
        folder = request.config.cache.mkdir("native")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        with open(folder / "lock", "w") as lock:  # of all processes that run tests, one builds
            fcntl.flock(lock, fcntl.LOCK_EX)
            return native._import(native.build())
