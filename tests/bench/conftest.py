"""One thread for tiny tensors: the waiting threads of several processes starve each other."""

from collections.abc import Iterator

import pytest

from cosformer.bench.timing import threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield
