"""Layers: attention around any mechanism, and a linear-time stand-in for nn.MultiheadAttention."""

from cosformer.nn.block import Block, FeedForward
from cosformer.nn.convert import convert
from cosformer.nn.drop_in import CosformerAttention
from cosformer.nn.layer import AttentionLayer, LayerState
from cosformer.nn.layer import check_conv_on as check_conv_on
from cosformer.nn.layer import check_gate as check_gate
from cosformer.nn.positions import sinusoids as sinusoids
from cosformer.nn.positions import sinusoids_from as sinusoids_from
from cosformer.nn.prepared import BlockStep as BlockStep
from cosformer.nn.prepared import PreparedBlock as PreparedBlock
from cosformer.nn.prepared import is_own as is_own
from cosformer.nn.prepared import norm_of as norm_of

__all__ = [  # what users call; the others are for the models
    "AttentionLayer",
    "Block",
    "CosformerAttention",
    "FeedForward",
    "LayerState",
    "convert",
]
