"""Layers: a linear-time stand-in for nn.MultiheadAttention, and its installer for whole models."""

from cosformer.nn.attention import CosformerAttention
from cosformer.nn.convert import convert

__all__ = ["CosformerAttention", "convert"]
