"""What a mechanism can do and what it costs, as data that errors, tables and tests read."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

GROWTH = {"n": 1.0, "n log n": 1.0, "n√n": 1.5, "n²": 2.0, "n³": 3.0}
"""How time grows with the length n -> the exponent of n, logarithms aside."""


@dataclass(frozen=True)
class Traits:
    """What a mechanism can do. A request outside it raises."""

    causal: Literal["exact", "leaky", "no"]
    """`leaky`: weights on the future are zero, but which past is seen depends on it."""
    full: bool = True
    """Attends to a whole sequence; False: to the past only."""
    cross: bool = True
    """Queries may come from another sequence, or stand at another index, than the keys."""
    state: Literal["constant", "window", "cache", "none"] = "none"
    """What a stream remembers: sums, the last few tokens, all tokens; or it cannot stream."""
    mask: bool = True
    """Takes a `key_mask`, by which some tokens are padding."""
    reads_mask: bool = False
    """Reads `key_mask` on the host: a call waits for the GPU, and a graph breaks there."""
    positions: Literal["none", "relative", "absolute"] = "none"
    """Whether weights depend on distances, on absolute positions, or on neither by themselves."""
    max_length: int | None = None
    """The most tokens of a sequence; None: any number."""
    multiple_of: int = 1
    """The number of tokens in a block, where it computes in blocks; any length may be given."""
    random: bool = False
    """Holds random numbers, which are saved with the parameters; only `redraw` changes them."""
    normalised: bool = True
    """The weights of a row sum to 1."""
    norm_after: bool = False
    """Nothing bounds its output: the layer puts a norm after it."""
    shared_qk: bool = False
    """Takes the queries as keys: a layer makes one projection for both."""
    controls: tuple[str, ...] = ()
    """Per-token numbers that the layer projects from its input, one per key head."""
    second_derivative: bool = True
    """Has a second derivative; False: goes through PyTorch's attention, whose gradient has none."""
    growth: Literal["n", "n log n", "n√n", "n²", "n³"] = "n"
    """How its time grows with the length n."""

    def __post_init__(self) -> None:
        if self.causal == "no" and (self.state != "none" or not self.full):
            raise ValueError("traits without a causal form must be full and have no state")

    @property
    def abilities(self) -> str:
        """What the mechanism can do, in words, for errors and tables."""
        causal = {"exact": "causal", "leaky": "causal (leaky)", "no": ""}[self.causal]
        streams = "" if self.state == "none" else f"streams ({self.state})"
        limit = "" if self.max_length is None else f"up to {self.max_length} tokens"
        full, cross = "full" if self.full else "", "cross" if self.cross else ""
        words = (causal, full, cross, streams, "key_mask" if self.mask else "", limit)
        return ", ".join(word for word in words if word)


class Cost(NamedTuple):
    """What a forward pass over one sequence costs, all heads together."""

    operations: int
    """Floating-point operations of the formula; a multiplication with an addition counts two."""
    bytes: int
    """Bytes of float32 numbers read or written: inputs, output, what is stored between passes."""
