"""What a conversion is asked to do."""

from dataclasses import dataclass
from typing import Literal, get_args

from cosformer.check import check_choice, check_positive, check_seed, check_whole

Replacement = Literal["cosformer-multiscale", "cosformer"]
"""What may take the place of softmax."""


@dataclass(frozen=True)
class Conversion:
    """Settings that decide what comes of a conversion."""

    mechanism: Replacement = "cosformer-multiscale"
    """What takes the place of softmax: cosformer-multiscale (with learned decays) or cosformer."""
    exact: tuple[int, ...] = ()
    """Numbers of layers that stay softmax: 0 is the first one, -1 the last."""
    exact_count: int = 0
    """Number of further layers that stay softmax. When all layers have learnt to match, it is those
    whose replacement by itself changes the model's last hidden states most."""
    expansion: int = 2
    """Features of each head's learned map, as a multiple of the head's width; 0: relu, no map."""
    horizon: float | None = None
    """The horizon. If not given: 65,536, and for cosformer the model's longest sequence."""
    match_steps: int = 300
    """Steps in which each layer learns its softmax layer's output."""
    match_rate: float = 1e-2
    """Highest learning rate of these steps; that of decays is 10 times as high."""
    distil_steps: int = 600
    """Steps in which the whole model learns the hidden states and the output of the original."""
    distil_rate: float = 3e-4
    """Highest learning rate of these steps; that of feature maps and decays is 4 times as high."""
    batch: int = 32
    """Texts in a step."""
    length: int = 128
    """Most tokens of a text; what is longer is cut off."""
    seed: int = 0
    """Seed of the order of the texts and of what a wide feature map begins with."""

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, get_args(Replacement))
        for name in ("exact_count", "expansion", "match_steps", "distil_steps"):
            check_whole(name, getattr(self, name), 0)
        for name in ("batch", "length"):
            check_whole(name, getattr(self, name), 1)
        if not isinstance(self.exact, tuple) or any(
            type(number) is not int for number in self.exact
        ):
            raise TypeError(f"exact must be a tuple of ints, got {self.exact!r}")
        for name in ("match_rate", "distil_rate"):
            check_positive(name, getattr(self, name))
        if self.horizon is not None:
            check_positive("horizon", self.horizon)
        check_seed(self.seed)

    def kept(self, layers: int) -> set[int]:
        """The numbers of `exact`, from 0 on, in a model of so many layers.

        >>> Conversion(exact=(-1,)).kept(6)
        {5}
        """
        if wrong := [number for number in self.exact if not -layers <= number < layers]:
            raise ValueError(f"exact must be numbers below the {layers} layers, got {wrong[0]}")
        kept = {number % layers for number in self.exact}
        if len(kept) + self.exact_count >= layers:
            raise ValueError(
                f"exact and exact_count must leave one of {layers} layers to convert, "
                f"got {self.exact} and {self.exact_count}"
            )
        return kept
