"""Attention over many processes: every rank has a stretch of each sequence."""

from cosformer.distributed.attention import attention, linear_attention

__all__ = ["attention", "linear_attention"]
