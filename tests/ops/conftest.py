"""One thread for the tests of the op, whose tensors are small, and Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():  # kernels run in Python then; before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
