"""Layers: attention around any mechanism, and a linear-time stand-in for nn.MultiheadAttention."""

from cosformer.nn.attention import CosformerAttention
from cosformer.nn.block import Block, FeedForward
from cosformer.nn.convert import convert
from cosformer.nn.multihead import LayerState, MultiHeadAttention

__all__ = [
    "Block",
    "CosformerAttention",
    "FeedForward",
    "LayerState",
    "MultiHeadAttention",
    "convert",
]
