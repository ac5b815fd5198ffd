"""A backbone as Transformers expects one: blocks that recompute, projections that are modules."""

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from cosformer.models import Backbone
from cosformer.nn import AttentionLayer, Block


class ModelBlock(GradientCheckpointingLayer, Block):
    """A block that computes again in the backward pass, where gradient checkpointing is on."""


class ModelAttention(AttentionLayer):
    """An attention layer whose input projection is a module, `in_proj`, as adapters need it."""

    in_proj: nn.Linear

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        return self.in_proj.weight

    @property
    def in_proj_bias(self) -> Tensor:  # type: ignore[override]
        return self.in_proj.bias

    def project_flat(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert query is key is value  # models have no other self-attention
        q, k, v = self.in_proj(query).split(self.projection_widths(), -1)
        return q, k, v


def adapted(backbone: Backbone) -> Backbone:
    """The same backbone with blocks and layers of the classes above; no number is changed."""
    for module in backbone.modules():
        if type(module) is Block:
            module.__class__ = ModelBlock
        elif type(module) is AttentionLayer:
            weight = module._parameters.pop("in_proj_weight")
            bias = module._parameters.pop("in_proj_bias")
            assert weight is not None
            assert bias is not None
            rows, columns = weight.shape
            with torch.device("meta"):
                projection = nn.Linear(columns, rows)
            projection.weight, projection.bias = weight, bias
            module.__class__ = ModelAttention
            module.in_proj = projection
    return backbone
