"""What the implementations in linear time receive and return, each as one named value.

An implementation has two functions:

    forward(given: Given) -> Results
    backward(given: Given, results: Results, grads: Grads, asked: Asked) -> Gradients
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Constants(NamedTuple):
    """Tensors that have no gradient."""

    key_mask: Tensor | None  # [B, S], True = real
    query_basis: Tensor  # ψ at the queries [b, h, T, R]
    key_basis: Tensor  # ψ at the keys [b, h, S, R]
    sequence: Tensor | None  # [T], which packed sequence a token belongs to
    bounds: Tensor | None  # [sequences + 1], where each begins


class Options(NamedTuple):
    """Numbers and names, which have no gradient either."""

    causal: bool
    feature_map: str
    rule: str
    eps: float
    scale: float
    impl: str
    keep_state: bool  # whether anybody asks for the last state
    even: bool = False  # whether all tokens of a head decay alike
    mild: bool = False  # whether every decay is known to be at least ½ a token
    gated: bool = False  # whether `Given.decay` is the gates themselves, not their running sum


class Given(NamedTuple):
    """One problem: first what may have a gradient, then what has none."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, H_kv, S, D]
    v: Tensor  # [B, H_kv, S, V]
    decay: Tensor | None  # L [b, h, T], or gates [B, H, T] under `Options.gated`
    state: Tensor | None  # [B, H_kv, R, D, V(+1)]; the last column sums the weights
    constants: Constants
    options: Options


class Results(NamedTuple):
    """What a forward pass makes; backward passes read it."""

    out: Tensor  # [B, H, T, V]
    total: Tensor  # row sums of weights [B, H, T]; T is 0 where nothing is divided
    last: Tensor | None  # the state after the keys, as `Given.state`
    kept: Tensor | None = None  # what an implementation keeps for its own backward pass
    fading: Tensor | None = None  # L, as an implementation keeps it for its own backward pass


class Grads(NamedTuple):
    """The gradients of a forward pass's results; None stands for zeros."""

    out: Tensor | None
    total: Tensor | None
    last: Tensor | None


class Gradients(NamedTuple):
    """The gradients of what was given; None for those that are not asked for."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    decay: Tensor | None = None
    state: Tensor | None = None


class Swept(NamedTuple):
    """The results of the kernels' backward pass; the state's gradient has every query head."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    state: Tensor | None = None
    by_query: Tensor | None = None  # φ(q)·dφ(q) of every row [B, H, T, 1], for the decay's gradient
    by_key: Tensor | None = None  # φ(k)·dφ(k)
    decay: Tensor | None = None  # the decay's gradient [B, H, T], where kernels make it themselves


class Asked(NamedTuple):
    """Which gradients a backward pass is asked for: sweeps that serve none of them are left out."""

    q: bool
    k: bool
    v: bool
    decay: bool = False
    state: bool = False

    @property
    def sweeps_q(self) -> bool:
        """Whether dφ(q) is needed: a decay's gradient is made up of φ(q)·dφ(q) and φ(k)·dφ(k)."""
        return self.q or self.decay

    @property
    def sweeps_k(self) -> bool:
        """Whether kernels need dφ(k): their sweep for it ends with the state's gradient."""
        return self.k or self.decay or self.state

    @property
    def reverse(self) -> bool:
        """Whether anything is swept from the end."""
        return self.sweeps_k or self.v


def room_for_outputs(q: Tensor, v: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Memory for the outputs of kernels, `[B, H, T, V]`, and for row totals `[B, H, T]` if any."""
    same_width = q.shape[3] == v.shape[3]
    out = torch.empty_like(q) if same_width else q.new_empty(*q.shape[:3], v.shape[3])
    rows = 0 if rule == "none" else q.shape[2]
    return out, q.new_empty(*q.shape[:2], rows, dtype=torch.float32)
