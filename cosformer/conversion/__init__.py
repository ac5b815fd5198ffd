"""A pretrained softmax model of Transformers' becomes a cosFormer, layer by layer."""

import importlib
from typing import TYPE_CHECKING, Any

from cosformer.conversion.settings import Conversion

if TYPE_CHECKING:
    from cosformer.conversion.convert import Converter, convert_pretrained, load
    from cosformer.conversion.judge import Pairs, embed, read_pairs, spearman
    from cosformer.conversion.stages import Progress
    from cosformer.conversion.texts import read_texts

__all__ = [
    "Conversion",
    "Converter",
    "Pairs",
    "Progress",
    "convert_pretrained",
    "embed",
    "load",
    "read_pairs",
    "read_texts",
    "spearman",
]


def __getattr__(name: str) -> Any:
    """All but the settings load Transformers, and so are imported on first use."""
    for room in ("convert", "judge", "stages", "texts") if name in __all__ else ():
        module = importlib.import_module(f"cosformer.conversion.{room}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'cosformer.conversion' has no attribute {name!r}")
