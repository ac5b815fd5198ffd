"""Attention in linear time in plain torch, on any device."""

from cosformer.ops.chunked.chunks import forget
from cosformer.ops.chunked.passes import backward, forward
