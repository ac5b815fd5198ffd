"""The model that is recommended for each use, and any other mechanism in its place."""

from typing import Any, Literal, get_args

from cosformer.check import check_bool, check_choice
from cosformer.models.pattern import read_parts

Use = Literal["lm", "mlm", "classify", "recall"]

RECOMMENDED = "cosformer-gated"
"""The mechanism that is recommended for text: constant memory, and no last token."""
RECALL = "softmax cosformer-gated"
"""The pattern where single tokens must be found again: no sum of constant size holds all of them,
and an exact layer learns to find them if it comes before the others."""
DECAYING = {"cosformer-multiscale", "cosformer-gated"}
"""Mechanisms that learn best with a norm and a sigmoid gate after their heads. They learn text
worse with a convolution, which helps softmax."""
GATED = {"retention", "delta", "gated-delta"}
"""Mechanisms with a norm of their own, which learn best with a gate of silu and a convolution."""
CONV: dict[Use, int] = {"lm": 4, "mlm": 5, "classify": 5, "recall": 4}
"""Width of the short convolution in every layer; centred, so odd, where both sides are seen."""


def recommended(
    use: Use, mechanism: str | None = None, *, both_ways: bool = False
) -> dict[str, Any]:
    """Fields of `ModelConfig` with which a mechanism, or a pattern of several, learns best.

    Every mechanism gets the positions that it wants and what was found to help it, so that two of
    them are compared fairly by one word.

    Args:
        use: `lm` (the next token), `mlm` (masked tokens), `classify`, or `recall` (single tokens of
            the past must be found again, as in the probes).
        mechanism: None: the recommended one; for `recall` a pattern of two layers.
        both_ways: whether the same weights learn with causality and without it, as when a language
            model is pre-trained on masked tokens: the convolution is then odd.

    >>> recommended("lm")["mechanism"], recommended("lm")["conv"], recommended("mlm")["conv"]
    ('cosformer-gated', 0, 5)
    """
    check_choice("use", use, get_args(Use))
    check_bool("both_ways", both_ways)
    if mechanism is None:
        mechanism = RECALL if use == "recall" else RECOMMENDED
    names = {name for name, _ in read_parts(mechanism)}
    decays = not DECAYING.isdisjoint(names)
    conv = 0 if use == "lm" and decays else CONV[use]
    if both_ways and conv % 2 == 0 and conv:
        conv += 1
    if decays:
        after: dict[str, Any] = {"norm": True, "gate": "sigmoid"}
    else:
        after = {"norm": None, "gate": not GATED.isdisjoint(names)}
    return {"mechanism": mechanism, "positions": "auto", **after, "conv": conv}
