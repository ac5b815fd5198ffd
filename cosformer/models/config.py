"""What a model is made of, as one frozen value; a preset is such a value with a name."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cosformer.check import check_bool, check_choice, check_dropout, check_mapping, check_whole
from cosformer.mechanisms import MECHANISMS

Kind = Literal["decoder", "masked-lm", "classifier", "pairs", "encoder-decoder"]
Pooling = Literal["mean", "cls", "first"]
PositionScheme = Literal["none", "learned", "sinusoidal", "rotary"]


@dataclass(frozen=True)
class ModelConfig:
    """A model around any mechanism; `dataclasses.replace(config, layers=4)` gives a changed one."""

    kind: Kind = "decoder"
    """`decoder`: a causal language model; `masked-lm`, `classifier`, `pairs` (two towers): an
    encoder with a head; `encoder-decoder`: from one sequence to another."""
    vocabulary: int = 256
    """Number of different tokens; 256 for bytes."""
    layers: int = 2
    """Number of blocks; an encoder-decoder has as many on either side."""
    width: int = 64
    """Width of a token's vector between blocks; a multiple of heads."""
    heads: int = 2
    """Number of attention heads."""
    key_heads: int | None = None
    """Number of heads of keys and values, a divisor of heads; None: as many as heads."""
    hidden: int | None = None
    """Width inside the feed-forward; None: 4 × width, or with glu 8/3 × width, rounded up to a
    multiple of 8, which gives about as many parameters."""
    mechanism: str = "cosformer"
    """A name of `cosformer.mechanisms.MECHANISMS`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the mechanism. Where it has a `max_length`, or a `horizon` that must be a number
    before it can stream, and none is given here, that is the config's max_length."""
    max_length: int = 1024
    """The longest sequence that learned positions, and mechanisms with a limit, are made for."""
    positions: PositionScheme = "learned"
    """Position scheme: added to the embeddings (`learned`, `sinusoidal`), applied in every layer
    (`rotary`), or `none`. Positions count real tokens, not padding."""
    glu: bool = False
    """Whether the feed-forward is gated: down(silu(gate x) ⊙ up x)."""
    tied: bool = True
    """Whether the output layer over the vocabulary is the embedding, transposed."""
    dropout: float = 0.0
    """Share that is dropped, in training, of embeddings and of what each part of a block adds."""
    classes: int | None = None
    """Number of classes of a classifier or of pairs; None for the other kinds."""
    pooling: Pooling = "mean"
    """How a classifier reads a sequence: the mean of its tokens, a learned token before them
    (`cls`), or its first token."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("pooling", self.pooling, get_args(Pooling))
        check_choice("positions", self.positions, get_args(PositionScheme))
        check_choice("mechanism", self.mechanism, MECHANISMS)
        for name in ("vocabulary", "layers", "width", "heads", "max_length"):
            check_whole(name, getattr(self, name), 1)
        for name in ("key_heads", "hidden", "classes"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
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
        """Whether the model's output is classes, not tokens."""
        return self.kind in ("classifier", "pairs")

    @property
    def feed_forward_width(self) -> int:
        """The width inside the feed-forward."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 24) * 8 if self.glu else 4 * self.width

    @property
    def mechanism_options(self) -> dict[str, Any]:
        """The options, with a horizon or max_length that fits every sequence."""
        length = self.max_length + (self.pooling == "cls")
        kind, limits = MECHANISMS[self.mechanism], {}
        if kind.stream_option == "horizon":
            limits["horizon"] = length
        if "max_length" in inspect.signature(kind).parameters:
            limits["max_length"] = length
        return limits | dict(self.options)
