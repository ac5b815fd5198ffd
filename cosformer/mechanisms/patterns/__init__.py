"""Softmax over some of the pairs: windows, strides, blocks, tokens that hash alike."""

from cosformer.mechanisms.patterns.bigbird import BigBird
from cosformer.mechanisms.patterns.local import Local, Longformer
from cosformer.mechanisms.patterns.reformer import Reformer
from cosformer.mechanisms.patterns.sinkhorn import Sinkhorn
from cosformer.mechanisms.patterns.sparse import SparseFixed, SparseStrided
from cosformer.mechanisms.patterns.transnormer import TransNormerLocal
