"""A run that is killed again and again ends as one that is not, bit for bit."""

import contextlib
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
import training_cases as cases

from cosformer.training import folder, train
from cosformer.training.checkpoints import parts
from cosformer.training.folder import state_of

pytestmark = pytest.mark.slow  # every kill needs a new process
PROCESSES = multiprocessing.get_context("forkserver")
# imported once for all processes, with what an optimiser imports on first use
PROCESSES.set_forkserver_preload(["cosformer.training", "torch._dynamo", "safetensors.torch"])


def in_process(config):
    torch.set_num_threads(1)
    train(config)


def dies_in_write(config, number):
    """Train, and be killed in the middle of the write of this number."""
    whole, writes = folder.replacing, iter(range(1, 10**9))

    @contextlib.contextmanager
    def half(path):
        with whole(path) as file:
            yield Half(file) if next(writes) == number else file

    folder.replacing = parts.replacing = half
    in_process(config)


class Half:
    """A file that takes half of what is written, then the process is no more."""

    def __init__(self, file):
        self.file = file

    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def ended(target, *arguments):
    """Exit code of a process."""
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def killed(config, *, steps, after):
    """Kill a run so many steps and seconds after it began; False if it has ended before."""
    process = PROCESSES.Process(target=in_process, args=(config,))
    last = config.out / "last.safetensors"
    seen = {last.stat().st_ino if last.exists() else None}
    process.start()
    while process.is_alive() and len(seen) <= steps:
        with contextlib.suppress(FileNotFoundError):
            seen.add(last.stat().st_ino)
        time.sleep(0.001)
    process.join(after)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def saving(out):
    """A run of two phases that is saved at every step."""
    return cases.config(out, pretraining=cases.pretraining(), save_seconds=0.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The outcome of a run of two phases that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert ended(in_process, saving(out)) == 0
    return out


def test_killed_at_any_moment_it_ends_the_same(tmp_path, undisturbed):
    config = saving(tmp_path / "killed")
    chance, times = random.Random(0), 0
    while killed(config, steps=chance.randrange(4), after=chance.uniform(0, 0.015)):
        times += 1
        if (log := config.out / "log.jsonl").exists():
            log.write_bytes(log.read_bytes() + b'{"phase": "tr')  # as a write that was cut short
    assert times >= 5
    assert state_of(config.out)["state"] == "finished"
    cases.assert_same_outcome(config.out, undisturbed)


def test_killed_in_the_middle_of_a_write_it_ends_the_same(tmp_path, undisturbed):
    config = saving(tmp_path / "killed")
    for number in (1, 2, 3, 4, 14):
        assert ended(dies_in_write, config, number) == -signal.SIGKILL
        assert (config.out / "config.json").exists() == (number > 1)
        assert state_of(config.out)["state"] == "interrupted"
    assert ended(in_process, config) == 0
    cases.assert_same_outcome(config.out, undisturbed)
    assert not list(config.out.glob(".*")), "unfinished files are left"
