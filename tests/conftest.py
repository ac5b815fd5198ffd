"""For all tests: threads, where kernels run (chosen before any import), memory, a command line."""

import os
import signal

import pytest
import torch

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its helpers import torch anew
torch.set_num_threads(1)  # tensors here are too small for a second thread to pay
collect_ignore_glob = []
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    collect_ignore_glob.append("*_gpu.py")  # files of tests that need a GPU


class Shell:
    """The command line as a user types it."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command; nothing of what was printed before."""
        from cosformer import cli

        self._capsys.readouterr()
        code = cli.main([str(word) for word in words])
        return code, *self._capsys.readouterr()

    def shows(self, *words: object) -> str:
        """What a command prints that must succeed."""
        code, out, err = self(*words)
        assert code == 0, err
        return out

    def refuses(self, *words: object) -> str:
        """The one line of a command that must end with a 2."""
        code, out, err = self(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        return err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def heard():
    """A shell's jobs in the background are deaf to Ctrl-C, and so would be their tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A group of one rank, in the process of the tests."""
    import torch.distributed as dist

    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
