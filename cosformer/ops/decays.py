"""The decays of a module's heads, given as numbers or by the name of a rule that makes them."""

from collections.abc import Callable

from torch import Tensor

from cosformer.check import check_number_or_tensor, check_whole, did_you_mean
from cosformer.memo import Numbers
from cosformer.ops.problem import Rates, as_numbers, is_one, sizes_of


def multiscale_decays(heads: int) -> tuple[float, ...]:
    """γ_h = 1 − 2^(−1 − 7.5·h/(H − 1)) for the heads h = 0 … H − 1, from ½ to 0.9972.

    A head with the decay γ sees about 1/(1 − γ) tokens: the first head 2, the last one 362, and
    each head in between the same factor more than the one before it. A single head gets the decay
    of the last one, because with the decay ½ a layer of one head would see two tokens.

    >>> [round(rate, 3) for rate in multiscale_decays(4)]
    [0.5, 0.912, 0.984, 0.997]
    """
    check_whole("heads", heads, 1)
    shares = [head / (heads - 1) for head in range(heads)] if heads > 1 else [1.0]
    return Numbers(1 - 2 ** (-1 - 7.5 * share) for share in shares)


NAMED: dict[str, Callable[[int], tuple[float, ...]]] = {"multiscale": multiscale_decays}
"""The name of a rule -> the function that makes the decays of so many heads."""


def read_decay(decay: Rates | str | None, key_heads: int) -> Rates | None:
    """The option of a module: None, one number, or one number per key head.

    Decays that are all 1 are None, no decay.

    They are plain numbers, part of how a module is made, like its width, and of no checkpoint: a
    cast of the module would round a tensor, and each call would have to look at it.
    """
    if decay is None:
        return None
    if isinstance(decay, str):
        if decay not in NAMED:
            raise ValueError(
                f"decay must be a number in (0, 1], one per key head, or one of the names "
                f"{', '.join(NAMED)}, got {decay!r}{did_you_mean(decay, NAMED)}"
            )
        return NAMED[decay](key_heads)
    if isinstance(decay, Tensor):
        check_number_or_tensor("decay", decay)
        if decay.requires_grad:
            raise ValueError(
                "decay must not require a gradient, because a module keeps plain numbers: call "
                "cosformer.attention(decay=…) to learn it, got a tensor that requires one"
            )
    if sizes_of(decay) not in ([], [key_heads]):
        raise ValueError(
            f"decay must be one number or one per key head [{key_heads}], got {sizes_of(decay)}"
        )
    numbers = as_numbers(decay.tolist() if isinstance(decay, Tensor) else decay, "decay")
    for number in [numbers] if isinstance(numbers, float) else numbers:
        if not 0 < number <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {number}")
    return None if is_one(numbers) else numbers
