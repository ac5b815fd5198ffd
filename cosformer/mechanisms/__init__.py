"""cosFormer and its rivals behind one interface: to compare two, change one word."""

from cosformer.mechanisms.base import MECHANISMS, Mechanism, refuse
from cosformer.mechanisms.cache import HeldCache, keep_in_place, map_streams
from cosformer.mechanisms.linear import (
    Delta,
    GatedDelta,
    GatedLinear,
    LinearMechanism,
    Retention,
    SinePositions,
    check_rotary,
    log_gate,
)
from cosformer.mechanisms.padding import ranks, real_first
from cosformer.mechanisms.request import Request, Split
from cosformer.mechanisms.seeded import Seeded
from cosformer.mechanisms.table import create, mechanism_class, register
from cosformer.mechanisms.traits import GROWTH, Cost, Traits

__all__ = [
    "GROWTH", "MECHANISMS", "Cost", "LinearMechanism", "Mechanism", "Request", "Traits", "create",
    "log_gate", "mechanism_class", "refuse", "register",
]  # fmt: skip
