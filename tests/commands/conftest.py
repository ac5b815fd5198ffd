"""A folder to type commands in, with a text, and a run of a language model."""

import shutil
from pathlib import Path

import pytest

from cosformer.training import Budget, Evaluation, RunConfig, TaskConfig, train

TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder to work in."""
    (tmp_path / "my.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A language model of bytes after three steps. It is only read."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("To be, or not to be: that is the question.\n" * 30)
    task = TaskConfig("lm", {"text": str(folder / "text.txt"), "length": 64})
    small = {"model": {"layers": 1, "width": 16}, "evaluation": Evaluation(every=3, batches=1)}
    train(RunConfig(task, folder / "run", budget=Budget(3, 2), device="cpu", **small))
    return folder / "run"


@pytest.fixture
def run(here, trained):
    """A copy of it in the folder to work in, to be changed."""
    return Path(shutil.copytree(trained, here / "runs" / "r"))
