"""Errors that say who refuses, what it can do, and who could do it instead."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from cosformer.mechanisms.traits import Traits

if TYPE_CHECKING:
    from cosformer.mechanisms.base import Mechanism


def refuse(
    mechanism: "Mechanism", task: str, able: Callable[[Traits], bool], hint: str = ""
) -> ValueError:
    """`raise refuse(self, "attend causally", lambda traits: traits.causal == "exact")`."""
    from cosformer.mechanisms.table import MECHANISMS

    other = nearest(mechanism, able)
    remedies = [hint] if hint else []
    if other is not None:
        option = MECHANISMS[other].stream_option if task == "stream" else ""
        remedies += [
            f"the nearest that can is {other!r}" + (f", made with {option}=…" * bool(option))
        ]
    return ValueError(
        f"{name_of(mechanism)} cannot {task}. It can do: "
        + "; ".join([mechanism.traits.abilities, *remedies])
    )


def nearest(mechanism: "Mechanism", able: Callable[[Traits], bool]) -> str | None:
    """Of those in the table that can: with the least lost, the most code shared, the same cost."""
    from cosformer.mechanisms.table import MECHANISMS

    mine, bases = mechanism.traits, set(type(mechanism).__mro__)

    def distance(name: str) -> tuple[int | bool, ...]:
        kind = MECHANISMS[name]
        theirs = kind.traits
        lost = sum(a and not b for a, b in zip(_abilities(mine), _abilities(theirs), strict=True))
        shared = len(bases & set(kind.__mro__))
        cost, norm = theirs.growth != mine.growth, theirs.norm_after != mine.norm_after
        return lost, -shared, cost, norm, len(theirs.controls)

    can = [
        name
        for name, kind in MECHANISMS.items()
        if able(kind.traits) and type(mechanism) is not kind
    ]
    return min(can, key=distance, default=None)


def _abilities(traits: Traits) -> tuple[bool, ...]:
    streams = traits.state != "none"
    return traits.causal != "no", traits.full, traits.cross, traits.mask, streams


def name_of(mechanism: "Mechanism") -> str:
    """Its name in the table; that of the class for one that is not there."""
    from cosformer.mechanisms.table import MECHANISMS

    kind = type(mechanism)
    return next((name for name, other in MECHANISMS.items() if other is kind), kind.__name__)
