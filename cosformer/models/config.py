"""What a model is made of, as one frozen value; a preset is such a value with a name."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cosformer.check import (
    check_bool,
    check_bools,
    check_choice,
    check_dropout,
    check_mapping,
    check_whole,
)
from cosformer.mechanisms import MECHANISMS
from cosformer.models.pattern import best_positions, read_pattern
from cosformer.nn import check_conv_on, check_gate

Kind = Literal["decoder", "masked-lm", "classifier", "pairs", "encoder-decoder"]
Pooling = Literal["mean", "cls", "first"]
PositionScheme = Literal["none", "learned", "sinusoidal", "rotary", "auto"]
Gate = Literal["silu", "sigmoid"]
ConvOn = Literal["input", "qkv"]
MOST_LAYERS = 2**20
"""More layers than any model has: the names of a forged number of them would fill the memory."""


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
    """Width of a token's vector between blocks; a multiple of heads unless head_dim is given."""
    heads: int = 2
    """Number of attention heads."""
    key_heads: int | None = None
    """Number of heads of keys and values, a divisor of heads; None: as many as heads."""
    head_dim: int | None = None
    """Width of a head's queries and keys; None: width / heads."""
    value_dim: int | None = None
    """Width of a head's values; None: head_dim. Wider values make a linear mechanism's state
    larger."""
    hidden: int | None = None
    """Width inside the feed-forward; None: 4 × width, or with glu 8/3 × width, rounded up to a
    multiple of 8, which gives about as many parameters."""
    mechanism: str = "cosformer"
    """A name of `cosformer.mechanisms.MECHANISMS`, or a pattern over the layers from the first
    on, as `cosformer*5 softmax`: five layers and then one, repeated; it must divide layers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the mechanism, or options of each by its name, as `{"local": {"window": 64}}`,
    which a pattern with several names needs. Where a mechanism has a `max_length`, or a `horizon`
    that must be a number before it can stream, and none is given here, that is the config's
    max_length."""
    max_length: int = 1024
    """The longest sequence that learned positions, and mechanisms with a limit, are made for."""
    positions: PositionScheme = "learned"
    """Position scheme: added to the embeddings (`learned`, `sinusoidal`), applied in every layer
    (`rotary`), or `none`; `auto` is what each mechanism wants (docs/models.md has the table).
    Positions count real tokens, not padding."""
    conv: int = 0
    """Width of a short convolution in every attention layer, each column by itself: 4 is usual in
    a decoder, where it sees the last tokens; odd, as 5, in an encoder, where it is centred; 0:
    none."""
    conv_on: ConvOn = "qkv"
    """What the convolution acts on: queries, keys and values (`qkv`), or the layer's `input`."""
    gate: bool | Gate = False
    """Whether heads are multiplied by a projection of the layer's input: its `silu` (or true), or
    its `sigmoid`."""
    norm: bool | None = None
    """Whether an RMSNorm per head follows the mechanism; None: where the mechanism asks for it."""
    qk_norm: bool = False
    """Whether an RMSNorm per head of queries and of keys stands before the mechanism."""
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
        for name in ("vocabulary", "layers", "width", "heads", "max_length"):
            check_whole(name, getattr(self, name), 1)
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers must be at most {MOST_LAYERS:,}, got {self.layers}")
        check_whole("conv", self.conv, 0)
        check_conv_on(self.conv, self.conv_on)
        for name in ("key_heads", "head_dim", "value_dim", "hidden", "classes"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads={self.heads}, got {self.width}")
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide heads={self.heads}, got {self.key_heads}")
        check_gate(self.gate)
        check_bools(glu=self.glu, tied=self.tied, qk_norm=self.qk_norm)
        if self.norm is not None:
            check_bool("norm", self.norm)
        check_dropout(self.dropout)
        check_mapping("options", self.options)
        self._check_options_by_name()
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
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each layer."""
        return read_pattern(self.mechanism, self.layers)

    @property
    def mechanism_options(self) -> dict[str, dict[str, Any]]:
        """The options of each mechanism by its name, with limits that fit every sequence."""
        names = dict.fromkeys(self.mechanisms)
        return {name: self._limits(name) | self._given(name) for name in names}

    def across(self, name: str) -> tuple[str, dict[str, Any]]:
        """The mechanism of the cross attention in a layer of this mechanism, and its options.

        A decay counts the tokens between query and key, and there are none between two sequences:
        cross attention is cosFormer without it, with the other options that cosFormer knows.
        """
        other = MECHANISMS[name].cross_form
        if not other:
            return name, self.mechanism_options[name]
        known = set(inspect.signature(MECHANISMS[other]).parameters) - {"decay"}
        given = {option: value for option, value in self._given(name).items() if option in known}
        return other, self._limits(other) | given

    def position_schemes(self, *, causal: bool) -> dict[str, str]:
        """The position scheme of each mechanism by its name, in a stack that is causal or not."""
        return {
            name: best_positions(MECHANISMS[name].traits, causal=causal, conv=self.conv > 0)
            if self.positions == "auto"
            else self.positions
            for name in self.mechanisms
        }

    def _given(self, name: str) -> dict[str, Any]:
        """The options that the config has for a mechanism."""
        single = len(set(self.mechanisms)) == 1 and name not in self.options
        return dict(self.options if single else self.options.get(name, {}))

    def _limits(self, name: str) -> dict[str, int]:
        """What a mechanism needs to be told of the length of sequences."""
        length = self.max_length + (self.pooling == "cls")
        kind = MECHANISMS[name]
        limits = {"horizon": length} if kind.stream_option == "horizon" else {}
        if "max_length" in inspect.signature(kind).parameters:
            limits["max_length"] = length
        return limits

    def _check_options_by_name(self) -> None:
        names = dict.fromkeys(self.mechanisms)
        if len(names) == 1 and names.keys().isdisjoint(self.options):
            return
        for name, options in self.options.items():
            if name not in names or not isinstance(options, Mapping):
                form = ", ".join(f'"{each}": {{…}}' for each in names)
                raise ValueError(
                    f"options must be by name for mechanism={self.mechanism!r}, as {{{form}}}, "
                    f"got {name}={options!r}"
                )


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(layers=2, width=64, heads=2),
    "mini": ModelConfig(layers=4, width=128, heads=4),
    "small": ModelConfig(layers=6, width=256, heads=4),
    "medium": ModelConfig(vocabulary=8192, layers=8, width=512, heads=8),
    "base": ModelConfig(vocabulary=50304, layers=12, width=768, heads=12, max_length=2048),
    "large": ModelConfig(vocabulary=50304, layers=24, width=1024, heads=16, max_length=2048),
    "huge": ModelConfig(vocabulary=50304, layers=24, width=2048, heads=16, max_length=2048),
}
"""Decoders over bytes; from `medium` on they have the vocabulary of a byte-pair encoding. `base`,
`large` and `huge` have 125 million, 350 million and 1.3 billion parameters."""

PARAMETERS = {
    "tiny": 182_016,
    "mini": 957_184,
    "small": 5_066_752,
    "medium": 29_938_688,
    "base": 125_262_336,
    "large": 355_919_872,
    "huge": 1_315_819_520,
}
"""Number of parameters of each preset; a test counts them."""
