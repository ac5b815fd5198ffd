"""A run that takes a second, and how its outcome is compared with another's."""

from pathlib import Path

import pytest
import training_cases

from cosformer.training import RunConfig


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return training_cases.config(tmp_path / "run")
