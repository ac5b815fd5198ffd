"""AdamW over parameters in groups with names."""

from torch import nn
from torch.optim import AdamW

from cosformer.training.config import Optimiser

GROUPS = ("matrices", "embeddings", "vectors")
"""Weights of matrices decay. Rows of embeddings do not: rare tokens would fade away; nor do biases
and norms."""


def grouped(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Group -> its parameters; a tied output layer is an embedding."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    found: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for parameter in model.parameters():
        if id(parameter) in tables:
            found["embeddings"].append(parameter)
        else:
            found["matrices" if parameter.dim() > 1 else "vectors"].append(parameter)
    return {name: parameters for name, parameters in found.items() if parameters}


def create_optimiser(groups: dict[str, list[nn.Parameter]], config: Optimiser) -> AdamW:
    """Its learning rate is set at every step."""
    described = [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if name == "matrices" else 0.0,
        }
        for name, parameters in groups.items()
    ]
    return AdamW(described, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
