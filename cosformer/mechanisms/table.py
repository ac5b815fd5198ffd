"""The mechanisms by name. To add one to the package: a class, and a line here."""

import inspect
from typing import Any

from cosformer.check import check_choice, did_you_mean
from cosformer.mechanisms import dense, linear, patterns
from cosformer.mechanisms.base import MECHANISMS, Mechanism

MECHANISMS |= {
    "cosformer": linear.Cosformer,
    "cosformer-multiscale": linear.CosformerMultiscale,
    "cosformer-gated": linear.CosformerGated,
    "softmax": dense.Softmax,
    "linear": linear.Linear,
    "relu": linear.Relu,
    "leaky-relu": linear.LeakyRelu,
    "identity": linear.Identity,
    "performer": linear.Performer,
    "rfa": linear.Rfa,
    "rfa-arccos": linear.RfaArccos,
    "rfa-gated": linear.RfaGated,
    "spe": linear.Spe,
    "rope-linear": linear.RopeLinear,
    "based": linear.Based,
    "hedgehog": linear.Hedgehog,
    "transnormer": linear.TransNormer,
    "transnormer-local": patterns.TransNormerLocal,
    "retention": linear.Retention,
    "gated-linear": linear.GatedLinear,
    "delta": linear.Delta,
    "gated-delta": linear.GatedDelta,
    "local": patterns.Local,
    "longformer": patterns.Longformer,
    "sparse": patterns.SparseFixed,
    "sparse-strided": patterns.SparseStrided,
    "bigbird": patterns.BigBird,
    "reformer": patterns.Reformer,
    "linformer": dense.Linformer,
    "nystromformer": dense.Nystromformer,
    "one-vs-each": dense.OneVsEach,
    "sinkhorn": patterns.Sinkhorn,
    "synthesizer": dense.SynthesizerRandom,
    "synthesizer-factorised": dense.SynthesizerFactorised,
    "synthesizer-dense": dense.SynthesizerDense,
}


def register(name: str, cls: type[Mechanism]) -> None:
    """Make a mechanism of your own known by a name, without a change to this package.

    `create`, the layer, `ModelConfig(mechanism=name)` and `cosformer train --mechanism name` then
    take the name. Registering the same class under its name again does nothing.

    Args:
        name: what no other mechanism is called, without blanks and `*`, of which patterns are made.
        cls: a subclass of `Mechanism` with `traits`, `source` and `formula`, whose first arguments
            are the number of heads and their width.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if name.split() != [name] or "*" in name:
        raise ValueError(f"name must be one word without *, got {name!r}")
    if not (isinstance(cls, type) and issubclass(cls, Mechanism)):
        raise TypeError(f"cls must be a subclass of Mechanism, got {cls!r}")
    for attribute in ("traits", "source", "formula"):
        if not hasattr(cls, attribute):
            raise ValueError(f"cls must have {attribute}, got {cls.__name__} without it")
    if MECHANISMS.get(name, cls) is not cls:
        raise ValueError(
            f"name must not be taken, got {name!r}, which is {MECHANISMS[name].__name__}"
        )
    MECHANISMS[name] = cls


def mechanism_class(name: str) -> type[Mechanism]:
    """The class behind a name; the error about an unknown name lists the known ones."""
    return MECHANISMS[check_choice("mechanism", name, MECHANISMS)]


def create(name: str, heads: int, width: int, **options: Any) -> Mechanism:
    """A mechanism by its name, for q of so many heads of this width.

    >>> create("cosformer", 8, 64, horizon=4096).traits.state
    'constant'
    """
    known = list(inspect.signature(mechanism_class(name)).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:  # a layer gives key_heads itself
        names = [option for option in known if option != "key_heads" or option not in options]
        meant = did_you_mean(unknown[0], names)
        raise ValueError(
            f"options of {name} are {', '.join(names) or 'none'}, got {', '.join(unknown)}{meant}"
        )
    return MECHANISMS[name](heads, width, **options)
