"""The model that is recommended for each use, and any other mechanism in its place."""

from typing import Any, Literal, get_args

from cosformer.check import check_choice

Use = Literal["lm", "mlm", "classify"]

RECOMMENDED = "cosformer-multiscale"
"""The mechanism that is recommended for every use: constant memory, and no last token."""
CONV: dict[Use, int] = {"lm": 4, "mlm": 5, "classify": 5}
"""Width of the short convolution in every layer; centred, so odd, where both sides are seen."""


def recommended(
    use: Use, mechanism: str | None = None, *, both_ways: bool = False
) -> dict[str, Any]:
    """Fields of `ModelConfig` with which a mechanism, or a pattern of several, learns best.

    Every mechanism gets the positions that it wants and a short convolution, so that two of them
    are compared fairly by one word.

    Args:
        use: `lm` (the next token), `mlm` (masked tokens) or `classify`.
        mechanism: None: the recommended one.
        both_ways: whether the same weights learn with causality and without it, as when a language
            model is pre-trained on masked tokens: the convolution is then odd.

    >>> recommended("lm")
    {'mechanism': 'cosformer-multiscale', 'positions': 'auto', 'conv': 4}
    >>> recommended("mlm", "softmax")
    {'mechanism': 'softmax', 'positions': 'auto', 'conv': 5}
    """
    check_choice("use", use, get_args(Use))
    conv = CONV[use]
    if both_ways and conv % 2 == 0:
        conv += 1
    return {"mechanism": mechanism or RECOMMENDED, "positions": "auto", "conv": conv}
