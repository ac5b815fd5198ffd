"""Other people's packages, for comparison only: imported if installed, else the test is skipped."""

import importlib
import warnings
from typing import Any

import pytest


def package(module: str) -> Any:
    """A module of the extra `peers`, without the warnings that its import brings up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            pytest.skip(f"{error.name} is not installed: pip install 'cosformer[peers]'")
