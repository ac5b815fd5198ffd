"""What a model is made of, as one frozen value; a preset is such a value with a name."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cosformer.check import check_bool, check_choice, check_dropout, check_mapping
from cosformer.mechanisms import MECHANISMS

Kind = Literal["decoder", "masked-lm", "classifier", "pairs", "encoder-decoder"]
Pooling = Literal["mean", "cls", "first"]
PositionScheme = Literal["none", "learned", "sinusoidal", "rotary"]


@dataclass(frozen=True)
class ModelConfig:
    """A model around any mechanism. To change one: `dataclasses.replace(config, layers=4)`."""

    kind: Kind = "decoder"
    """`decoder`: a causal language model; `masked-lm`, `classifier`, `pairs` (two towers): an
    encoder with a head; `encoder-decoder`: from one sequence to another."""
    vocabulary: int = 256
    """How many tokens there are; 256 for bytes."""
    layers: int = 2
    """Blocks; an encoder-decoder has so many on either side."""
    width: int = 64
    """Of a token between blocks; a multiple of heads."""
    heads: int = 2
    """Attention heads."""
    key_heads: int | None = None
    """Heads of keys and values, a divisor of heads; None: as many."""
    hidden: int | None = None
    """Width inside the feed-forward; None: 4 × width, with glu 8/3 × width, up to a multiple of 8,
    which is about as many parameters."""
    mechanism: str = "cosformer"
    """A name of `cosformer.mechanisms.MECHANISMS`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the mechanism. A horizon or max_length that it knows and is not here is max_length."""
    max_length: int = 1024
    """The longest sequence that learned positions, and mechanisms with a limit, are made for."""
    positions: PositionScheme = "learned"
    """Added to the embeddings (`learned`, `sinusoidal`), or in every layer (`rotary`). Real tokens
    are counted, padding is not."""
    glu: bool = False
    """A gated feed-forward: down(silu(gate x) ⊙ up x)."""
    tied: bool = True
    """The output layer over the vocabulary is the embedding, transposed."""
    dropout: float = 0.0
    """Of embeddings and of what each part of a block adds, in training."""
    classes: int | None = None
    """Of a classifier or pairs; None for the others."""
    pooling: Pooling = "mean"
    """How a classifier reads a sequence: the mean of its tokens, a learned token before them
    (`cls`), or its first token."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("pooling", self.pooling, get_args(Pooling))
        check_choice("positions", self.positions, get_args(PositionScheme))
        check_choice("mechanism", self.mechanism, MECHANISMS)
        for name in ("vocabulary", "layers", "width", "heads", "max_length"):
            check_size(name, getattr(self, name))
        for name in ("key_heads", "hidden", "classes"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads={self.heads}, got {self.width}")
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide heads={self.heads}, got {self.key_heads}")
        check_bool("glu", self.glu)
        check_bool("tied", self.tied)
        check_dropout(self.dropout)
        check_mapping("options", self.options)
        if (self.classes is not None) != self.classifies:
            rule = "be given" if self.classifies else "be None"
            raise ValueError(f"classes must {rule} for kind={self.kind!r}, got {self.classes}")
        if self.pooling != "mean" and not self.classifies:
            raise ValueError(
                f"pooling must be left as 'mean' for kind={self.kind!r}, which pools nothing, "
                f"got {self.pooling!r}"
            )
        if not self.tied and self.classifies:
            raise ValueError(f"tied must be left as True for kind={self.kind!r}, got False")

    @property
    def classifies(self) -> bool:
        """Whether its output is classes, not tokens."""
        return self.kind in ("classifier", "pairs")

    @property
    def feed_forward_width(self) -> int:
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 24) * 8 if self.glu else 4 * self.width

    @property
    def mechanism_options(self) -> dict[str, Any]:
        """The options, with a horizon or max_length that fits every sequence."""
        length = self.max_length + (self.pooling == "cls")
        known = inspect.signature(MECHANISMS[self.mechanism]).parameters
        limits = {name: length for name in ("horizon", "max_length") if name in known}
        return limits | dict(self.options)


def check_size(name: str, value: Any) -> int:
    """A whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
