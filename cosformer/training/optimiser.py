"""AdamW over parameters in groups with names."""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from cosformer.training.config import Optimiser

GROUPS = ("matrices", "embeddings", "vectors")
"""Weights of matrices decay. Rows of embeddings do not: rare tokens would fade away; nor do biases
and norms."""

COUNT = "step"
STATE = (COUNT, "exp_avg", "exp_avg_sq")
"""What AdamW knows of a parameter."""


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


def create_optimiser(
    groups: dict[str, list[nn.Parameter]], config: Optimiser, lr: Tensor | None = None
) -> AdamW:
    """AdamW. Its learning rate is set before every step: in its groups, or in the tensor `lr`."""
    described = [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if name == "matrices" else 0.0,
        }
        for name, parameters in groups.items()
    ]
    return AdamW(
        described,
        lr=config.lr if lr is None else lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
        capturable=lr is not None,
    )


def moments(model: nn.Module, optimiser: AdamW) -> dict[str, Tensor]:
    """The optimiser's state by name, as `exp_avg.head.weight`."""
    return {
        f"{key}.{name}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimiser.state.get(parameter, {}).items()
    }


def begin_moments(model: nn.Module, optimiser: AdamW) -> None:
    """Give every parameter the state of a step that was never taken, to be filled by another's."""
    for parameter in model.parameters():
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        both = {key: torch.zeros_like(parameter) for key in STATE if key != COUNT}
        optimiser.state[parameter] = {COUNT: count, **both}
