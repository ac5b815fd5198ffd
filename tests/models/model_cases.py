"""Models small enough for tests, one for every mechanism and kind, and tokens for them."""

from typing import Any

import torch
from torch import Tensor

from cosformer.mechanisms import MECHANISMS
from cosformer.models import ModelConfig, create_model

F64 = torch.float64
VOCABULARY = 23

OPTIONS: dict[str, dict[str, Any]] = {
    "cosformer": {},
    "softmax": {},
    "spe": {"realizations": 8},
    "gated-delta": {},
    "transnormer-local": {"block": 4},
    "local": {"window": 6},
    "sparse-strided": {"stride": 4},
    "bigbird": {"block": 3, "random_blocks": 1},
    "reformer": {"bucket": 4, "rounds": 2},
    "nystromformer": {"landmarks": 4, "kernel": 3},
    "sinkhorn": {"block": 4},
}
"""Mechanisms that differ in what a model must do for them, at sizes that matter for few tokens."""

MULTISCALE = {"decay": "multiscale", "horizon": float("inf")}
DRESSED = {"conv": 4, "gate": "sigmoid", "qk_norm": True, "head_dim": 6, "value_dim": 10}
HYBRIDS: dict[str, dict[str, Any]] = {
    "global": {"mechanism": "cosformer*2 softmax", "options": {"cosformer": MULTISCALE}},
    "multiscale": {"mechanism": "cosformer-multiscale*2 softmax", "conv": 4},
    "gated": {"mechanism": "cosformer-gated*2 local", "options": {"local": {"window": 6}}},
    "windows": {"mechanism": "local cosformer*2", "options": {"local": {"window": 6}}},
    "gates": {"mechanism": "gated-delta softmax", "layers": 4, **DRESSED},
    "dressed": {"mechanism": "cosformer softmax cosformer", **DRESSED},
    "on input": {"mechanism": "cosformer softmax cosformer", **DRESSED, "conv_on": "input"},
    "positions": {"mechanism": "linear softmax local", "positions": "learned"},
}
"""Models whose layers differ, of three layers and with the positions that these want."""

STREAMS = [name for name, kind in MECHANISMS.items() if kind.traits.state != "none"]


def config(mechanism: str = "cosformer", **arguments: Any) -> ModelConfig:
    """Of a small model with a mechanism, a pattern, or the name of a hybrid."""
    given: dict[str, Any] = {"vocabulary": VOCABULARY, "width": 16, "max_length": 48}
    if mechanism in HYBRIDS:
        given |= {"layers": 3, "positions": "auto", **HYBRIDS[mechanism]}
    else:
        given |= {"mechanism": mechanism, "options": OPTIONS.get(mechanism, {})}
    if arguments.get("kind") in ("classifier", "pairs"):
        given["classes"] = 5
    return ModelConfig(**{**given, **arguments})


def make(mechanism: str = "cosformer", **arguments: Any) -> Any:
    return made(config(mechanism, **arguments))


def made(config: ModelConfig) -> Any:
    """In float64, in evaluation mode, its weights large enough for tokens to matter."""
    torch.manual_seed(0)
    model = create_model(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += (1 if "embedding" in name else 0.2) * torch.randn_like(parameter)
    return model


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def pad(tokens: Tensor, side: str, count: int = 5) -> tuple[Tensor, Tensor]:
    """With other tokens left, right, or scattered among these, and the mask of the real ones."""
    length = tokens.shape[1] + count
    mixed = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    places = {
        "left": torch.arange(count, length),
        "right": torch.arange(tokens.shape[1]),
        "between": mixed[: tokens.shape[1]].sort().values,
    }[side]
    padded = draw(len(tokens), length, seed=9)
    mask = torch.zeros(len(tokens), length, dtype=torch.bool)
    padded[:, places], mask[:, places] = tokens, True
    return padded, mask
