"""For all tests: how many threads, and where kernels run, which is chosen before any import."""

import os

import torch

os.environ["COSFORMER_NATIVE"] = "0"  # replayed calls have tests of their own
torch.set_num_threads(1)  # tensors here are too small for a second thread to pay
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
