"""Where a run computes."""

import os

import torch


def resolved(device: str) -> str:
    """The device by its own name: `auto` is a GPU where there is one, else the CPU.

    Of several processes on a machine, which torchrun numbers, each has a GPU of its own.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and (number := os.environ.get("LOCAL_RANK")):
        device = f"cuda:{number}"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one that torch finds, got {device!r} where it finds "
            f"{torch.cuda.device_count()} GPUs"
        )
    return device
