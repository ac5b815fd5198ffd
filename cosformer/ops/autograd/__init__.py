"""The one differentiable function around all implementations in linear time."""

from cosformer.ops.autograd.function import Saved, attend, gradients

__all__ = ["Saved", "attend", "gradients"]
