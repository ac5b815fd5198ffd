"""Attention, layers and models over many processes: every rank has a stretch of each sequence."""

from cosformer.distributed.attention import attention, linear_attention
from cosformer.distributed.split import split, unsplit

__all__ = ["attention", "linear_attention", "split", "unsplit"]
