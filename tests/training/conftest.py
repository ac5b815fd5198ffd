"""A run that takes a third of a second, new and finished."""

import shutil

import pytest
import training_cases

from cosformer.training import train


@pytest.fixture
def config(tmp_path):
    """A run that has not begun."""
    return training_cases.config(tmp_path / "run")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of that run, finished, and nothing happened to it. It is only read."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(training_cases.config(out))
    return out


@pytest.fixture
def finished(config, whole):
    """A copy of the finished run, to be changed."""
    shutil.copytree(whole, config.out)
    return config
