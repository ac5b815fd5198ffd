"""The model that is recommended for each use, and its rivals in their best clothes."""

from typing import Any, Literal, get_args

from cosformer.check import check_choice

Use = Literal["lm", "mlm", "classify"]

RECOMMENDED = "cosformer-multiscale"
"""The mechanism that is recommended for every use: constant memory, and no last token."""
CONV: dict[Use, int] = {"lm": 4, "mlm": 5, "classify": 5}
"""Width of the short convolution in every layer; centred, so odd, where both sides are seen."""


def recommended(use: Use, mechanism: str = RECOMMENDED) -> dict[str, Any]:
    """Fields of `ModelConfig` with which a mechanism, or a pattern of several, learns best.

    Every mechanism gets the positions that it wants and a short convolution, so that two of them
    are compared fairly by one word.

    >>> recommended("lm", "softmax")
    {'mechanism': 'softmax', 'positions': 'auto', 'conv': 4}
    """
    check_choice("use", use, get_args(Use))
    return {"mechanism": mechanism, "positions": "auto", "conv": CONV[use]}
