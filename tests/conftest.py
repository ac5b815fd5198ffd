"""For all tests: how many threads, and where kernels run, which is chosen before any import."""

import os

import torch

torch.set_num_threads(1)  # tensors here are too small for a second thread to pay
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
