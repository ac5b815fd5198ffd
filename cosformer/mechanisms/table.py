"""Every mechanism by name. To add one: a file, and a line here."""

import inspect
from typing import Any

from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.cosine import Cosformer
from cosformer.mechanisms.softmax import Softmax

MECHANISMS: dict[str, type[Mechanism]] = {
    "cosformer": Cosformer,
    "softmax": Softmax,
}


def create(name: str, heads: int, width: int, **options: Any) -> Mechanism:
    """A mechanism by its name, for q of so many heads of this width.

    >>> create("cosformer", 8, 64, horizon=4096).traits.state
    'constant'
    """
    if name not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}, got {name!r}")
    known = list(inspect.signature(MECHANISMS[name]).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"options of {name} are {', '.join(known)}, got {', '.join(unknown)}")
    return MECHANISMS[name](heads, width, **options)
