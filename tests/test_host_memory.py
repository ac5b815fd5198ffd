"""Freed memory: kept for the next tensor, unless the environment has a say."""

import os
import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from cosformer.host_memory import keep_freed_memory, keeps_freed_memory

def fewest():
    counts = []
    for _ in range(17):  # the first ones leave holes that later ones fill
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        torch.ones(16 * 2**20)  # 64 MB
    return min(after - before for before, after in zip(counts, counts[1:]))

print(fewest(), keep_freed_memory(), fewest(), keeps_freed_memory())
"""

pytestmark = [
    pytest.mark.slow,  # each test starts a process
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc"),
]


def run(**environment):
    taken = {name: x for name, x in os.environ.items() if not name.startswith("MALLOC_")}
    taken.pop("GLIBC_TUNABLES", None)
    command = [sys.executable, "-c", COUNT]
    return subprocess.check_output(command, env=taken | environment, timeout=120, text=True).split()


def test_the_next_tensor_has_no_page_to_wait_for():
    before, done, after, kept = run()
    assert done == kept == "True"
    if before == "0":
        pytest.skip("this system does not count page faults")
    assert int(after) < 8 < int(before)  # 32 at least, of 2 MB each


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_the_environment_goes_first(name):
    value = "2" if name.startswith("MALLOC") else "glibc.malloc.arena_max=2"
    assert run(**{name: value})[1::2] == ["False", "None"]


def test_variables_do_the_same_before_python_starts():
    assert int(run(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="-1")[0]) < 8
