"""Every mechanism by name. To add one: a file, and a line here."""

import inspect
from typing import Any

from cosformer.check import check_choice
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.patterns.bigbird import BigBird
from cosformer.mechanisms.linear.cosformer import Cosformer
from cosformer.mechanisms.linear.decay import GatedLinear, Retention
from cosformer.mechanisms.linear.delta import Delta, GatedDelta
from cosformer.mechanisms.linear.elementwise import Identity, LeakyRelu, Linear, Relu
from cosformer.mechanisms.linear.learned import Based, Hedgehog
from cosformer.mechanisms.dense.linformer import Linformer
from cosformer.mechanisms.patterns.local import Local, Longformer
from cosformer.mechanisms.dense.nystromformer import Nystromformer
from cosformer.mechanisms.dense.one_vs_each import OneVsEach
from cosformer.mechanisms.linear.performer import Performer
from cosformer.mechanisms.patterns.reformer import Reformer
from cosformer.mechanisms.linear.rfa import Rfa, RfaArccos, RfaGated
from cosformer.mechanisms.linear.rope import RopeLinear
from cosformer.mechanisms.patterns.sinkhorn import Sinkhorn
from cosformer.mechanisms.dense.softmax import Softmax
from cosformer.mechanisms.patterns.sparse import SparseFixed, SparseStrided
from cosformer.mechanisms.linear.spe import Spe
from cosformer.mechanisms.dense.synthesizer import (
    SynthesizerDense,
    SynthesizerFactorised,
    SynthesizerRandom,
)
from cosformer.mechanisms.patterns.transnormer import TransNormer, TransNormerLocal

MECHANISMS: dict[str, type[Mechanism]] = {
    "cosformer": Cosformer,
    "softmax": Softmax,
    "linear": Linear,
    "relu": Relu,
    "leaky-relu": LeakyRelu,
    "identity": Identity,
    "performer": Performer,
    "rfa": Rfa,
    "rfa-arccos": RfaArccos,
    "rfa-gated": RfaGated,
    "spe": Spe,
    "rope-linear": RopeLinear,
    "based": Based,
    "hedgehog": Hedgehog,
    "transnormer": TransNormer,
    "transnormer-local": TransNormerLocal,
    "retention": Retention,
    "gated-linear": GatedLinear,
    "delta": Delta,
    "gated-delta": GatedDelta,
    "local": Local,
    "longformer": Longformer,
    "sparse": SparseFixed,
    "sparse-strided": SparseStrided,
    "bigbird": BigBird,
    "reformer": Reformer,
    "linformer": Linformer,
    "nystromformer": Nystromformer,
    "one-vs-each": OneVsEach,
    "sinkhorn": Sinkhorn,
    "synthesizer": SynthesizerRandom,
    "synthesizer-factorised": SynthesizerFactorised,
    "synthesizer-dense": SynthesizerDense,
}


def mechanism_class(name: str) -> type[Mechanism]:
    """The class behind a name; another name is answered with the known ones."""
    return MECHANISMS[check_choice("mechanism", name, MECHANISMS)]


def create(name: str, heads: int, width: int, **options: Any) -> Mechanism:
    """A mechanism by its name, for q of so many heads of this width.

    >>> create("cosformer", 8, 64, horizon=4096).traits.state
    'constant'
    """
    known = list(inspect.signature(mechanism_class(name)).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        free = ", ".join(option for option in known if option not in options) or "none"
        raise ValueError(f"options of {name} are {free}, got {', '.join(unknown)}")
    return MECHANISMS[name](heads, width, **options)
