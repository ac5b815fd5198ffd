"""Without a GPU the kernels run under Triton's interpreter, which is chosen before any import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
