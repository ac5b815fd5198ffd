"""Softmax over some of the pairs: windows, strides, blocks, tokens that hash alike."""

from cosformer.mechanisms.patterns.bigbird import BigBird as BigBird
from cosformer.mechanisms.patterns.local import Local as Local
from cosformer.mechanisms.patterns.local import Longformer as Longformer
from cosformer.mechanisms.patterns.reformer import Reformer as Reformer
from cosformer.mechanisms.patterns.sinkhorn import Sinkhorn as Sinkhorn
from cosformer.mechanisms.patterns.sparse import SparseFixed as SparseFixed
from cosformer.mechanisms.patterns.sparse import SparseStrided as SparseStrided
from cosformer.mechanisms.patterns.transnormer import TransNormerLocal as TransNormerLocal
