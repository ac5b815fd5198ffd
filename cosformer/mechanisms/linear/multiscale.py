"""cosFormer with a decay: one for each head, fixed or learned, or one for each token.

A decay of at most 2^(-24/horizon) makes every weight vanish before the horizon, where the cosine
turns negative (`ops.vanishing_decay`), so that sequences and streams have no last token.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import cosformer.ops as ops
from cosformer.check import check_bool, check_number
from cosformer.mechanisms.linear.decay import log_gate
from cosformer.mechanisms.linear.family import LinearMechanism
from cosformer.mechanisms.request import Request

HORIZON = 65_536.0
"""The horizon by default: decays of up to 0.99974 vanish before it, and multiscale ones are 0.9972
at most. Heads see a few thousand tokens, over which its cosine is nearly 1."""


class DecayingCosformer(LinearMechanism):
    """What the two mechanisms share: relu features, a cosine up to a horizon, no cross attention.

    They go through `linear_attention`, which leaves it to its caller to mind the horizon.
    """

    traits = replace(LinearMechanism.traits, cross=False, positions="relative")
    cross_form = "cosformer"
    feature_map = "relu"
    log_most: float | None = None
    """The logarithm of the largest decay, where a control decides on that of each token."""

    def __init__(
        self, heads: int, width: int, *, key_heads: int | None = None, horizon: float
    ) -> None:
        super().__init__(heads, width, key_heads=key_heads)
        check_number("horizon", horizon)
        found = ops.read_horizon(horizon, heads, self.key_heads)
        assert isinstance(found, float)
        self.horizon, self.theta = found, math.pi / (2 * found)
        self.states = ops.WEIGHTS[ops.kind_within(found, "cosine")]

    def check_position(self, state: Any, tokens: int) -> None:
        if self.traits.max_length is not None:
            ops.check_length(tokens, self.horizon, state.sums.position)

    def check_state(self, state: Any, k: Tensor, v: Tensor) -> None:
        super().check_state(state, k, v)
        ops.check_continues(state.sums, k, v, self.horizon, "cosine", self.rates)

    def held_state(self, k: Tensor, v: Tensor, length: int, position: Tensor) -> Any:
        held = super().held_state(k, v, length, position)
        return held._replace(sums=ops.laid_out(held.sums))

    def prepared(
        self, state: Any, layout: ops.Layout, after: ops.After, clock: ops.Clock, base: float | None
    ) -> ops.SumsToken | None:
        sums = state.sums
        k = sums.key_sum[:, :, 0, None, :]
        controls = dict.fromkeys(self.traits.controls, k[..., 0])
        by = self._recurrence(k, Request(True, None, 0, controls))._replace(log_decay=None)
        if base is not None or not ops.SumsToken.serves(sums, by):
            return None
        return ops.SumsToken(layout, sums, by, after, clock, self.log_most)

    @property
    def rates(self) -> ops.Rates | None:
        """The decay that a state must have; None where every token has its own."""
        return None


class CosformerMultiscale(DecayingCosformer):
    """cosFormer with a decay for each head: some heads see few tokens, others many."""

    source = "cosFormer: Qin et al., ICLR 2022; a decay for each head: Sun et al., 2023"
    formula = (
        "out_i = Σ_j s_ij v_j / Σ_j s_ij, "
        "s_ij = relu(q_i)·relu(k_j) γ_h^|i − j| cos(π/2 (i − j)/horizon)"
    )
    length_hint = "make it with decays of at most 2^(-24/horizon), or with a larger horizon"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        horizon: float = HORIZON,
        decay: ops.Rates | str = "multiscale",
        learned: bool = False,
    ) -> None:
        """`horizon`: one number; `math.inf` leaves the cosine out. `decay`: γ in (0, 1], one
        number, one per key head, or `multiscale`, which stands for `cosformer.multiscale_decays`.
        Where every decay is at most 2^(-24/horizon), weights vanish before the horizon and no
        sequence is too long; otherwise none may be longer than the horizon. `learned`: whether
        decays are parameters. They begin with these numbers, which must then be below
        2^(-24/horizon), and stay below it. Checkpoints hold no decay that is not learned."""
        super().__init__(heads, width, key_heads=key_heads, horizon=horizon)
        check_bool("learned", learned)
        self.decay = ops.read_decay(decay, self.key_heads)
        self.most = ops.vanishing_decay(self.horizon)
        self.forgets = learned or isinstance(self.decay, tuple)
        self.logit = nn.Parameter(self._first_logits()) if learned else None
        if not learned and self.states == 2 and not ops.vanishes(self.decay, self.horizon):
            self.traits = replace(self.traits, max_length=ops.whole_limit(self.horizon))

    @property
    def rates(self) -> ops.Rates:
        """γ: numbers, or `[H_kv]` in float64 where they are learned.

        A learned γ is 2^(-24/horizon) · sigmoid(logit). With the share s = sigmoid(logit) a head
        sees about 1/(1 − s) tokens, and d log γ^δ / d logit = δ(1 − s) is about 1 where that head
        looks, whether it sees two tokens or thousands: no head learns faster than another, and the
        gradient fades at neither end before the weights themselves do.
        """
        if self.logit is None:
            return 1.0 if self.decay is None else self.decay
        return self.most * self.logit.double().sigmoid()

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        return {"theta": self.theta, "gamma": self.rates}

    prepared = DecayingCosformer.prepared  # which knows this weight

    def _first_logits(self) -> Tensor:
        numbers = self.decay if isinstance(self.decay, tuple) else (self.decay or 1.0,)
        rates = torch.tensor(numbers, dtype=torch.float64).expand(self.key_heads)
        if float(rates.max()) >= self.most:
            raise ValueError(
                f"decay must be below 2^(-24/horizon) = {self.most:.6g} where it is learned, "
                f"got {float(rates.max()):.6g}: raise horizon, or name smaller decays"
            )
        return (rates / self.most).logit().float()


class CosformerGated(DecayingCosformer):
    """cosFormer with a decay for each token: a gate says how much of the past is left."""

    traits = replace(DecayingCosformer.traits, controls=("gate",))
    source = "cosFormer: Qin et al., ICLR 2022; a gate for each token and head: Yang et al., 2023"
    formula = (
        "out_i = Σ_j s_ij v_j / Σ_j s_ij, "
        "s_ij = relu(q_i)·relu(k_j) Π_{j<t≤i} γ_t cos(π/2 (i − j)/horizon), "
        "γ_t = 2^(−24/horizon) sigmoid(gate_t)"
    )
    forgets = True

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        horizon: float = HORIZON,
    ) -> None:
        """`horizon`: one number; `math.inf` leaves the cosine out. No decay is above
        2^(-24/horizon), so weights vanish before the horizon and no sequence is too long. A layer's
        gates begin as `cosformer.multiscale_decays` for every token."""
        super().__init__(heads, width, key_heads=key_heads, horizon=horizon)
        self.log_most = math.log(ops.vanishing_decay(self.horizon))

    def control_bias(self, name: str) -> Tensor | None:
        rates = torch.tensor(
            ops.multiscale_decays(self.key_heads), dtype=torch.float64, device="cpu"
        )
        return rates.logit()

    def weight(self, k: Tensor, request: Request) -> dict[str, Any]:
        assert self.log_most is not None
        # masked tokens let the past fade by `log_most` too: they count as distance to the cosine
        return {"theta": self.theta, "log_decay": log_gate(request, "gate") + self.log_most}

    prepared = DecayingCosformer.prepared  # which knows this weight
