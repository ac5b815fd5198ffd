"""cosFormer and its rivals behind one interface: to compare two, change one word."""

from cosformer.mechanisms.base import MECHANISMS, Mechanism, refuse
from cosformer.mechanisms.linear import Delta as Delta
from cosformer.mechanisms.linear import GatedDelta as GatedDelta
from cosformer.mechanisms.linear import GatedLinear as GatedLinear
from cosformer.mechanisms.linear import LinearMechanism, log_gate
from cosformer.mechanisms.linear import Retention as Retention
from cosformer.mechanisms.linear import SinePositions as SinePositions
from cosformer.mechanisms.linear import check_rotary as check_rotary
from cosformer.mechanisms.padding import ranks as ranks
from cosformer.mechanisms.padding import real_first as real_first
from cosformer.mechanisms.request import Request
from cosformer.mechanisms.request import Split as Split
from cosformer.mechanisms.seeded import Seeded as Seeded
from cosformer.mechanisms.table import create, mechanism_class, register
from cosformer.mechanisms.traits import GROWTH, Cost, Traits

__all__ = [
    "GROWTH", "MECHANISMS", "Cost", "LinearMechanism", "Mechanism", "Request", "Traits", "create",
    "log_gate", "mechanism_class", "refuse", "register",
]  # fmt: skip
