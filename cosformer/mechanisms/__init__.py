"""cosFormer and its rivals behind one interface: to compare two, change one word."""

from cosformer.mechanisms.base import Mechanism, Request
from cosformer.mechanisms.table import MECHANISMS, create
from cosformer.mechanisms.traits import Cost, Traits

__all__ = ["MECHANISMS", "Cost", "Mechanism", "Request", "Traits", "create"]
