"""cosFormer as a mechanism ("cosFormer: Rethinking Softmax in Attention", Qin et al., 2022)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import cosformer.ops as ops
from cosformer.check import check_eps
from cosformer.mechanisms.base import Mechanism
from cosformer.mechanisms.request import NO_CONTROLS, Controls, Request, Split
from cosformer.mechanisms.traits import Cost, Traits
from cosformer.runtime import compute_dtype


class Cosformer(Mechanism):
    """cosFormer: relu features, weighted by the cosine of the distance, and by a decay if given."""

    traits = Traits(causal="exact", state="constant", positions="relative")
    source = "Qin et al., ICLR 2022"
    stream_option = "horizon"
    cross_form = "cosformer"
    state_type = ops.State
    length_hint = (
        "make it with a larger horizon, with weight='raised_cosine', "
        "or with a decay of at most 2^(-24/horizon)"
    )
    formula = "out_i = Σ_j s_ij v_j / Σ_j s_ij, s_ij = relu(q_i)·relu(k_j) cos(π/2 (i − j)/horizon)"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        key_heads: int | None = None,
        horizon: float | Sequence[float] | Tensor | None = None,
        decay: ops.Rates | str | None = None,
        weight: str = "cosine",
        eps: float = 1e-6,
    ) -> None:
        """`horizon`: one number or one per head; None is the length of each call, but a stream
        needs a number; `math.inf` leaves the cosine out. `decay`: γ in (0, 1], by which weights
        shrink with every token between query and key: one number, one per key head, or
        `multiscale`, which stands for `cosformer.multiscale_decays`. There is no cross attention
        with a decay. Where every decay is at most 2^(-24/horizon), weights vanish before the
        horizon, and no sequence is too long. Checkpoints hold neither horizon nor decay."""
        super().__init__(heads, width, key_heads=key_heads)
        self.horizon = ops.read_horizon(horizon, heads, self.key_heads)
        self.weight, self.eps = ops.check_weight(weight), check_eps(eps)
        self.kind = ops.kind_within(self.horizon, weight)
        self.decay = ops.read_decay(decay, self.key_heads)
        if self.decay is not None:
            self.traits = replace(self.traits, cross=False)
        if (
            self.horizon is not None
            and self.kind == "cosine"
            and not ops.vanishes(self.decay, self.horizon)
        ):
            self.traits = replace(self.traits, max_length=ops.whole_limit(self.horizon))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        self.check_length(max(k.shape[2], request.start + q.shape[2]) - min(request.start, 0))
        return ops.attention(q, k, v, **self._options(request))

    @property
    def queries_later(self) -> bool:
        return type(self).attend_split is Cosformer.attend_split

    def attend_split(
        self, q: Tensor, k: Tensor, v: Tensor, request: Request, split: Split
    ) -> Tensor:
        options = self._options(request)
        del options["query_start"]  # query i stands at key i
        return split.attention(q, k, v, **options)

    def dense(self, q: Tensor, k: Tensor, request: Request) -> Tensor:
        return ops.attention_weights(q, k, **self._options(request))

    def empty_state(self, k: Tensor, v: Tensor) -> ops.State:
        if self.horizon is None:
            raise _no_horizon()
        sizes, like = (*k.shape[:2], k.shape[3], v.shape[3]), compute_dtype(k.dtype)
        given: dict[str, Any] = {"horizon": self.horizon, "weight": self.weight}
        given |= {"decay": self.decay, "dtype": like, "device": k.device}
        return ops.State.empty(*sizes, **given)

    def check_state(self, state: Any, k: Tensor, v: Tensor) -> None:
        super().check_state(state, k, v)
        if self.horizon is None:
            raise _no_horizon()
        rates = 1.0 if self.decay is None else self.decay  # None would mean the state's own
        ops.check_continues(state, k, v, self.horizon, self.weight, rates)

    def check_position(self, state: Any, tokens: int) -> None:
        if state.is_limited:
            ops.check_length(tokens, state.horizon, state.position)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, request: Request
    ) -> tuple[Tensor, ops.State]:
        options: dict[str, Any] = {"key_mask": request.key_mask, "eps": self.eps}
        return ops.attention_with_state(q, k, v, state=state, **options)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, controls: Controls = NO_CONTROLS
    ) -> tuple[Tensor, ops.State]:
        return ops.take_step(q, k, v, state, self._recurrence(k.device)), state

    def held_state(self, k: Tensor, v: Tensor, length: int, position: Tensor) -> ops.State:
        return ops.laid_out(super().held_state(k, v, length, position))

    def prepared(
        self, state: Any, layout: ops.Layout, after: ops.After, clock: ops.Clock, base: float | None
    ) -> ops.SumsToken | None:
        by = self._recurrence(state.key_value.device)
        if base is not None or not ops.SumsToken.serves(state, by):
            return None
        return ops.SumsToken(layout, state, by, after, clock)

    def state_size(self, length: int) -> int:
        sums = ops.WEIGHTS[self.kind] * self.width * (self.value_width + 1)
        return self.key_heads * (sums + isinstance(self.decay, Sequence))

    def cost(self, length: int) -> Cost:
        states = ops.WEIGHTS[self.kind]
        operations = 4 * states * self.heads * length * self.width * (self.width + 1)
        return Cost(operations, 4 * self.numbers(length))

    def _recurrence(self, device: torch.device) -> ops.Recurrence:
        """What a step computes, made once for each device."""
        found: ops.Recurrence | None = self._recurrences.get(device)
        if found is None:
            assert self.horizon is not None
            like = torch.empty(1, self.key_heads, 1, 1, device=device)
            angle = ops.angle_of(self.horizon, like)
            rates = None
            if self.decay is not None:
                rates = torch.tensor(self.decay, dtype=torch.float64, device=device).reshape(1, -1)
            found = ops.Recurrence(angle, self.kind, eps=self.eps, decay=rates)
            self._recurrences[device] = found
        return found

    def _options(self, request: Request) -> dict[str, Any]:
        given = {"horizon": self.horizon, "decay": self.decay, "weight": self.weight}
        return request.options | given | {"eps": self.eps}


def _no_horizon() -> ValueError:
    return ValueError(
        "horizon must be a number for a stream, got None: make it with one, as horizon=4096"
    )
