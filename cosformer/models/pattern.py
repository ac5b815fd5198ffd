"""Models whose layers differ: which mechanism each layer has, and which positions it wants."""

from cosformer.check import check_choice
from cosformer.mechanisms import MECHANISMS, Traits


def read_pattern(mechanism: str, layers: int) -> tuple[str, ...]:
    """The mechanism of each layer.

    >>> read_pattern("cosformer*2 softmax", 6)
    ('cosformer', 'cosformer', 'softmax', 'cosformer', 'cosformer', 'softmax')
    """
    names: list[str] = []
    for name, count in read_parts(mechanism):
        names += [name] * min(count, layers + 1)  # a count may be huge
    if len(names) > layers:
        raise ValueError(
            f"mechanism must be a pattern of at most layers={layers} layers, got {mechanism!r}: "
            "raise layers, or shorten the pattern"
        )
    if layers % len(names):
        raise ValueError(
            f"mechanism must be a pattern whose {len(names)} layers divide layers={layers}, got "
            f"{mechanism!r}: name all {layers} layers, or change layers"
        )
    return tuple(names) * (layers // len(names))


def read_parts(mechanism: str) -> list[tuple[str, int]]:
    """The mechanisms that a pattern names, and how many layers in a row have each.

    >>> read_parts("cosformer*2 softmax")
    [('cosformer', 2), ('softmax', 1)]
    """
    if not isinstance(mechanism, str):
        raise TypeError(f"mechanism must be a string, got {type(mechanism).__name__}")
    found = []
    for part in mechanism.split() or [mechanism]:
        name, star, count = part.partition("*")
        if star and not (name and count):
            raise ValueError(
                f"mechanism must be written as NAME*COUNT without blanks, got {mechanism!r}"
            )
        check_choice("mechanism", name, MECHANISMS)
        if star and not (count.isdecimal() and int(count) > 0):
            raise ValueError(
                f"mechanism must be written as NAME*COUNT with a count from 1 on, got {part!r}"
            )
        found.append((name, int(count) if star else 1))
    return found


def best_positions(traits: Traits, *, causal: bool, conv: bool) -> str:
    """The position scheme that a mechanism wants, by its traits: `rotary`, `none` or `learned`.

    conv: whether its layer has a short convolution, which tells left from right.
    """
    if traits.state in ("cache", "window") and traits.max_length is None:
        return "rotary"  # weights of single pairs of tokens
    if traits.state == "constant" and traits.positions != "none":
        # A cosine or a decay of the distance is the same to the left and to the right.
        return "none" if causal or conv or traits.positions == "absolute" else "learned"
    return "learned"
