"""Linear-time attention: cosFormer made exact, fast, streamable and easy to drop in."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosformer.nn import convert
    from cosformer.ops import (
        State,
        attention,
        attention_weights,
        attention_with_state,
        linear_attention,
        linear_attention_step,
        linear_attention_with_state,
        multiscale_decays,
        step,
    )

__version__ = "0.1.0"
__all__ = [
    "State",
    "attention",
    "attention_weights",
    "attention_with_state",
    "convert",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_with_state",
    "multiscale_decays",
    "step",
]


ROOMS = ("distributed", "mechanisms", "models", "nn", "ops", "tasks", "training")
"""Packages that can be used after `import cosformer` alone."""


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that the command line starts without torch."""
    if name in ROOMS:
        return importlib.import_module(f"cosformer.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'cosformer' has no attribute {name!r}")
    home = importlib.import_module("cosformer.nn" if name == "convert" else "cosformer.ops")
    globals()[name] = found = getattr(home, name)
    return found


def __dir__() -> list[str]:
    """The public names, whether they have been imported yet or not."""
    return sorted(["__version__", *__all__, *ROOMS])
