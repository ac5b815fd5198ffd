"""A run that takes a third of a second, new and finished."""

import shutil
from pathlib import Path

import pytest
import training_cases

from cosformer.training import RunConfig, train


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run that has not begun."""
    return training_cases.config(tmp_path / "run")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that run, finished, and nothing happened to it. It is only read."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(training_cases.config(out))
    return out


@pytest.fixture
def finished(config: RunConfig, whole: Path) -> RunConfig:
    """A copy of the finished run, to be changed."""
    shutil.copytree(whole, config.out)
    return config
