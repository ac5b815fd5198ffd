"""Errors that say who refuses, what it can do, and who could do it instead."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from cosformer.mechanisms.traits import Traits

if TYPE_CHECKING:
    from cosformer.mechanisms.base import Mechanism


def refuse(mechanism: "Mechanism", task: str, able: Callable[[Traits], bool]) -> ValueError:
    """`raise refuse(self, "attend causally", lambda traits: traits.causal == "exact")`."""
    other = nearest(mechanism, able)
    remedy = "" if other is None else f"; the nearest that can is {other!r}"
    return ValueError(
        f"{name_of(mechanism)} cannot {task}. It can do: {mechanism.traits.abilities}{remedy}"
    )


def nearest(mechanism: "Mechanism", able: Callable[[Traits], bool]) -> str | None:
    """Of those in the table that can, the one whose traits differ least."""
    from cosformer.mechanisms.table import MECHANISMS

    def difference(name: str) -> int:
        mine, theirs = mechanism.traits, MECHANISMS[name].traits
        return sum(getattr(mine, f.name) != getattr(theirs, f.name) for f in fields(Traits))

    can = [
        name
        for name, kind in MECHANISMS.items()
        if able(kind.traits) and not isinstance(mechanism, kind)
    ]
    return min(can, key=difference, default=None)


def name_of(mechanism: "Mechanism") -> str:
    """Its name in the table; that of the class for one that is not there."""
    from cosformer.mechanisms.table import MECHANISMS

    kind = type(mechanism)
    return next((name for name, other in MECHANISMS.items() if other is kind), kind.__name__)
